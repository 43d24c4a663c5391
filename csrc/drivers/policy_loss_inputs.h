// What a call of policy_loss was given: its tensors and options, checked.
//
// Offsets and counts on a GPU are not read here, which would wait for the device: there offsets that make no sense give
// NaN, and so does a denominator that is no count.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "drivers/checks.h"
#include "drivers/device.h"

namespace grpo_mc {

constexpr const char* kPolicyLoss = "policy_loss";

inline bool is_one_of(std::string_view value, std::initializer_list<std::string_view> choices) {
  for (const std::string_view choice : choices) {
    if (value == choice) return true;
  }
  return false;
}

inline void check_name(const char* name, std::string_view value, std::initializer_list<std::string_view> choices) {
  std::string list;
  for (const std::string_view choice : choices) list += (list.empty() ? "" : ", ") + std::string(choice);
  TORCH_CHECK_VALUE(is_one_of(value, choices), kPolicyLoss, ": ", name, " is '", value, "'; use one of ", list);
}

// The tensors of one call, contiguous and in the dtype of logprobs.
struct PolicyInputs {
  explicit PolicyInputs(const at::Tensor& logprobs_) : logprobs(logprobs_.contiguous()), tokens(logprobs_.numel()) {
    TORCH_CHECK_VALUE(logprobs_.dim() == 1 && (logprobs_.scalar_type() == at::kFloat || logprobs_.scalar_type() == at::kDouble),
                      kPolicyLoss, ": logprobs are ", logprobs_.scalar_type(), logprobs_.sizes(), "; they must be Float or Double [T]");
  }

  at::Tensor per_token(const char* name, const at::Tensor& x, at::ScalarType dtype) const {
    TORCH_CHECK_VALUE(x.sizes() == logprobs.sizes(), kPolicyLoss, ": ", name, " is ", x.sizes(), " but logprobs are ", logprobs.sizes(),
                      "; pass one entry per packed token");
    return x.to(dtype).contiguous();
  }

  void set_sequences(const std::optional<at::Tensor>& cu_seqlens, const std::optional<at::Tensor>& groups) {
    if (!cu_seqlens.has_value()) return;
    TORCH_CHECK_VALUE(cu_seqlens->dim() == 1 && cu_seqlens->numel() >= 1 && cu_seqlens->scalar_type() == at::kLong, kPolicyLoss,
                      ": cu_seqlens is ", cu_seqlens->scalar_type(), cu_seqlens->sizes(), "; it must be Long [N + 1]");
    starts = cu_seqlens->contiguous();
    num_sequences = starts.numel() - 1;
    if (!runs_on_cuda(starts)) check_starts();
    if (!groups.has_value()) return;
    TORCH_CHECK_VALUE(groups->dim() == 1 && groups->numel() == num_sequences && groups->scalar_type() == at::kLong, kPolicyLoss,
                      ": sequence_groups is ", groups->scalar_type(), groups->sizes(), " but cu_seqlens holds ", num_sequences,
                      " sequences; pass one Long group id per sequence");
    sequence_groups = groups->contiguous();
  }

  void check_starts() const {
    const int64_t* start = starts.const_data_ptr<int64_t>();
    TORCH_CHECK_VALUE(start[0] == 0 && start[num_sequences] == tokens, kPolicyLoss, ": cu_seqlens runs from ", start[0], " to ",
                      start[num_sequences], "; it must start with 0 and end with the ", tokens, " tokens");
    for (int64_t i = 0; i < num_sequences; ++i) {
      TORCH_CHECK_VALUE(start[i] <= start[i + 1], kPolicyLoss, ": cu_seqlens[", i + 1, "] is ", start[i + 1], " after ", start[i],
                        "; it must not decrease");
    }
  }

  int64_t start(int64_t sequence) const { return starts.const_data_ptr<int64_t>()[sequence]; }

  at::Tensor logprobs, old_logprobs, advantages, mask, ref_logprobs, entropy, weights, starts, sequence_groups;
  int64_t tokens, num_sequences = 0;
};

inline void check_options(std::string_view kind, double clip_low, double clip_high, std::optional<double> dual_clip,
                   std::optional<std::string_view> kl, std::string_view kl_gradient, double beta, double entropy_coef, bool has_ref,
                   bool has_entropy) {
  check_name("kind", kind, {"clip", "gspo", "gspo_token", "cispo", "reinforce"});
  check_name("kl", kl.value_or("none"), {"none", "k1", "k2", "k3"});
  check_name("kl_gradient", kl_gradient, {"direct", "k2", "importance"});
  check_finite(kPolicyLoss, "clip_low", clip_low);
  check_finite(kPolicyLoss, "clip_high", clip_high);
  TORCH_CHECK_VALUE(clip_low >= 0 && clip_high >= 0, kPolicyLoss, ": clip_low is ", clip_low, " and clip_high ", clip_high,
                    "; both must be at least 0");
  TORCH_CHECK_VALUE(!dual_clip.has_value() || (*dual_clip > 1 && std::isfinite(*dual_clip)), kPolicyLoss, ": dual_clip is ",
                    dual_clip.value_or(0), "; it must be finite and above 1, or None for off");
  check_finite(kPolicyLoss, "beta", beta);
  check_finite(kPolicyLoss, "entropy_coef", entropy_coef);
  TORCH_CHECK_VALUE(!dual_clip.has_value() || (kind != "cispo" && kind != "reinforce"), kPolicyLoss, ": dual_clip is ",
                    dual_clip.value_or(0), " but kind is ", kind, ", which has no such bound; set dual_clip to None");
  TORCH_CHECK_VALUE(kl.has_value() == has_ref, kPolicyLoss, ": got ", kl.has_value() ? "kl" : "ref_logprobs",
                    " alone; give both kl and ref_logprobs, or neither");
  TORCH_CHECK_VALUE(beta == 0 || kl.has_value(), kPolicyLoss, ": beta is ", beta, " but kl is None; name an estimator or set beta to 0");
  TORCH_CHECK_VALUE(entropy_coef == 0 || has_entropy, kPolicyLoss, ": entropy_coef is ", entropy_coef,
                    " but entropy is None; pass entropy [T]");
}

inline void check_aggregation(const PolicyInputs& in, std::string_view kind, std::string_view aggregation, std::optional<int64_t> norm_length) {
  check_name("aggregation", aggregation, {"token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum",
                                          "sequence_mean_token_sum_norm", "group_mean"});
  const bool needs_sequences = is_one_of(kind, {"gspo", "gspo_token"}) || aggregation != "token_mean";
  TORCH_CHECK_VALUE(!needs_sequences || in.starts.defined(), kPolicyLoss, ": kind ", kind, " with aggregation ", aggregation,
                    " needs cu_seqlens [N + 1]; got None");
  TORCH_CHECK_VALUE(aggregation != "group_mean" || in.sequence_groups.defined(), kPolicyLoss,
                    ": aggregation group_mean needs sequence_groups [N]; got None");
  TORCH_CHECK_VALUE(aggregation != "sequence_mean_token_sum_norm" || norm_length.value_or(0) >= 1, kPolicyLoss,
                    ": aggregation sequence_mean_token_sum_norm needs norm_length >= 1 (the maximum response length in tokens); got ",
                    norm_length.has_value() ? std::to_string(*norm_length) : "None");
}

}  // namespace grpo_mc
