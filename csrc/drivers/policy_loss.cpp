// policy_loss on the CPU: checks, aggregation coefficients, sequence ratios; the token arithmetic is in
// cpu/policy_loss.cpp. Tokens are cut into fixed chunks whose sums are added in order, so the result does not
// depend on the number of threads.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "common/numerics.h"
#include "drivers/checks.h"
#include "cpu/kernels.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;
using std::string_view;
constexpr const char* kOp = "policy_loss";
constexpr int64_t kChunk = 2048;  // tokens

bool is_one_of(string_view value, std::initializer_list<string_view> choices) {
  for (const string_view choice : choices) {
    if (value == choice) return true;
  }
  return false;
}

void check_name(const char* name, string_view value, std::initializer_list<string_view> choices) {
  std::string list;
  for (const string_view choice : choices) list += (list.empty() ? "" : ", ") + std::string(choice);
  TORCH_CHECK_VALUE(is_one_of(value, choices), kOp, ": ", name, " is '", value, "'; use one of ", list);
}

// The tensors of one call, contiguous and in the dtype of logprobs.
struct Inputs {
  Inputs(const Tensor& logprobs_) : logprobs(logprobs_.contiguous()), tokens(logprobs_.numel()) {
    TORCH_CHECK_VALUE(logprobs_.dim() == 1 && (logprobs_.scalar_type() == at::kFloat || logprobs_.scalar_type() == at::kDouble),
                      kOp, ": logprobs are ", logprobs_.scalar_type(), logprobs_.sizes(), "; they must be Float or Double [T]");
  }

  Tensor per_token(const char* name, const Tensor& x, at::ScalarType dtype) const {
    TORCH_CHECK_VALUE(x.sizes() == logprobs.sizes(), kOp, ": ", name, " is ", x.sizes(), " but logprobs are ", logprobs.sizes(),
                      "; pass one entry per packed token");
    return x.to(dtype).contiguous();
  }

  void set_sequences(const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& groups) {
    if (!cu_seqlens.has_value()) return;
    TORCH_CHECK_VALUE(cu_seqlens->dim() == 1 && cu_seqlens->numel() >= 1 && cu_seqlens->scalar_type() == at::kLong, kOp,
                      ": cu_seqlens is ", cu_seqlens->scalar_type(), cu_seqlens->sizes(), "; it must be Long [N + 1]");
    starts = cu_seqlens->contiguous();
    num_sequences = starts.numel() - 1;
    const int64_t* start = starts.const_data_ptr<int64_t>();
    TORCH_CHECK_VALUE(start[0] == 0 && start[num_sequences] == tokens, kOp, ": cu_seqlens runs from ", start[0], " to ",
                      start[num_sequences], "; it must start with 0 and end with the ", tokens, " tokens");
    for (int64_t i = 0; i < num_sequences; ++i) {
      TORCH_CHECK_VALUE(start[i] <= start[i + 1], kOp, ": cu_seqlens[", i + 1, "] is ", start[i + 1], " after ", start[i],
                        "; it must not decrease");
    }
    if (!groups.has_value()) return;
    TORCH_CHECK_VALUE(groups->dim() == 1 && groups->numel() == num_sequences && groups->scalar_type() == at::kLong, kOp,
                      ": sequence_groups is ", groups->scalar_type(), groups->sizes(), " but cu_seqlens holds ", num_sequences,
                      " sequences; pass one Long group id per sequence");
    sequence_groups = groups->contiguous();
  }

  int64_t start(int64_t sequence) const { return starts.const_data_ptr<int64_t>()[sequence]; }

  Tensor logprobs, old_logprobs, advantages, mask, ref_logprobs, entropy, weights, starts, sequence_groups;
  int64_t tokens, num_sequences = 0;
};

int64_t masked_count(const Inputs& in, int64_t sequence) {
  const auto* mask = static_cast<const bool*>(in.mask.const_data_ptr());
  int64_t count = 0;
  for (int64_t t = in.start(sequence); t < in.start(sequence + 1); ++t) count += mask[t];
  return count;
}

// Tokens in the loss of each sequence, or of the sequence's whole group.
std::vector<int64_t> mean_counts(const Inputs& in, bool by_group) {
  std::vector<int64_t> counts(static_cast<size_t>(in.num_sequences));
  for (int64_t i = 0; i < in.num_sequences; ++i) counts[static_cast<size_t>(i)] = masked_count(in, i);
  if (!by_group) return counts;
  const int64_t* group = in.sequence_groups.const_data_ptr<int64_t>();
  std::unordered_map<int64_t, int64_t> total;
  for (int64_t i = 0; i < in.num_sequences; ++i) total[group[i]] += counts[static_cast<size_t>(i)];
  for (int64_t i = 0; i < in.num_sequences; ++i) counts[static_cast<size_t>(i)] = total[group[i]];
  return counts;
}

template <typename T>
void fill_coefficients(const Inputs& in, const std::vector<int64_t>& counts, double base, Tensor& out) {
  T* data = out.mutable_data_ptr<T>();
  for (int64_t i = 0; i < in.num_sequences; ++i) {
    const int64_t count = counts[static_cast<size_t>(i)];
    const T value = static_cast<T>(count > 0 ? base / static_cast<double>(count) : 0.0);
    for (int64_t t = in.start(i); t < in.start(i + 1); ++t) data[t] = value;
  }
}

// exp of each sequence's mean log-ratio over its masked tokens, at every token of the sequence.
struct SequenceRatio {
  std::vector<double> ratio, slope;  // slope: d ratio / d one log-prob; 0 beyond the exponent bound
  Tensor per_token;
};

template <typename T>
SequenceRatio sequence_ratio(const Inputs& in) {
  const auto size = static_cast<size_t>(in.num_sequences);
  SequenceRatio out{std::vector<double>(size), std::vector<double>(size), at::empty_like(in.logprobs)};
  const T *logprob = in.logprobs.const_data_ptr<T>(), *old = in.old_logprobs.const_data_ptr<T>();
  const auto* mask = static_cast<const bool*>(in.mask.const_data_ptr());
  T* per_token = out.per_token.mutable_data_ptr<T>();
  parallel_for(in.num_sequences, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0;
      int64_t count = 0;
      for (int64_t t = in.start(i); t < in.start(i + 1); ++t) {
        if (!mask[t]) continue;
        sum += static_cast<double>(logprob[t]) - static_cast<double>(old[t]);
        ++count;
      }
      const double mean = count > 0 ? sum / static_cast<double>(count) : 0.0;
      const double ratio = std::exp(mean < -kMaxExponent ? -kMaxExponent : mean > kMaxExponent ? kMaxExponent : mean);
      out.ratio[static_cast<size_t>(i)] = ratio;
      out.slope[static_cast<size_t>(i)] = count > 0 && std::abs(mean) <= kMaxExponent ? ratio / static_cast<double>(count) : 0.0;
      for (int64_t t = in.start(i); t < in.start(i + 1); ++t) per_token[t] = static_cast<T>(ratio);
    }
  });
  return out;
}

// gspo: every masked token of a sequence moves the ratio of all of them.
template <typename T>
void add_sequence_gradient(const Inputs& in, const SequenceRatio& sequences, const Tensor& grad_ratio, Tensor& grad_logprobs) {
  const T* by_ratio = grad_ratio.const_data_ptr<T>();
  T* grad = grad_logprobs.mutable_data_ptr<T>();
  const auto* mask = static_cast<const bool*>(in.mask.const_data_ptr());
  parallel_for(in.num_sequences, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double total = 0;
      for (int64_t t = in.start(i); t < in.start(i + 1); ++t) total += by_ratio[t];
      const T share = static_cast<T>(total * sequences.slope[static_cast<size_t>(i)]);
      for (int64_t t = in.start(i); t < in.start(i + 1); ++t) {
        if (mask[t]) grad[t] += share;
      }
    }
  });
}

PolicySums run_chunks(const PolicyTokens& tokens, Element dtype, int64_t num_tokens) {
  const int64_t chunks = (num_tokens + kChunk - 1) / kChunk;
  std::vector<PolicySums> parts(static_cast<size_t>(chunks));
  parallel_for(chunks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t stop = std::min(num_tokens, (i + 1) * kChunk);
      parts[static_cast<size_t>(i)] = GRPO_MC_KERNEL(policy_loss_chunk)(tokens, dtype, i * kChunk, stop);
    }
  });
  PolicySums total;
  for (const PolicySums& part : parts) {
    total.token_count += part.token_count;
    total.ratio += part.ratio;
    total.clip_low += part.clip_low;
    total.clip_high += part.clip_high;
    total.dual_clip += part.dual_clip;
    total.kl += part.kl;
    total.entropy += part.entropy;
    total.policy_loss += part.policy_loss;
    total.loss += part.loss;
  }
  return total;
}

Tensor metrics_tensor(const PolicySums& s) {
  Tensor out = at::empty({8}, at::TensorOptions().dtype(at::kDouble));
  const double values[8] = {s.token_count, s.ratio, s.clip_low, s.clip_high, s.dual_clip, s.kl, s.entropy, s.policy_loss};
  std::copy(values, values + 8, out.mutable_data_ptr<double>());
  return out;
}

void check_options(string_view kind, double clip_low, double clip_high, std::optional<double> dual_clip,
                   std::optional<string_view> kl, string_view kl_gradient, double beta, double entropy_coef, bool has_ref,
                   bool has_entropy) {
  check_name("kind", kind, {"clip", "gspo", "gspo_token", "cispo", "reinforce"});
  check_name("kl", kl.value_or("none"), {"none", "k1", "k2", "k3"});
  check_name("kl_gradient", kl_gradient, {"direct", "k2", "importance"});
  check_finite(kOp, "clip_low", clip_low);
  check_finite(kOp, "clip_high", clip_high);
  TORCH_CHECK_VALUE(clip_low >= 0 && clip_high >= 0, kOp, ": clip_low is ", clip_low, " and clip_high ", clip_high,
                    "; both must be at least 0");
  TORCH_CHECK_VALUE(!dual_clip.has_value() || (*dual_clip > 1 && std::isfinite(*dual_clip)), kOp, ": dual_clip is ",
                    dual_clip.value_or(0), "; it must be finite and above 1, or None for off");
  check_finite(kOp, "beta", beta);
  check_finite(kOp, "entropy_coef", entropy_coef);
  TORCH_CHECK_VALUE(!dual_clip.has_value() || (kind != "cispo" && kind != "reinforce"), kOp, ": dual_clip is ",
                    dual_clip.value_or(0), " but kind is ", kind, ", which has no such bound; set dual_clip to None");
  TORCH_CHECK_VALUE(kl.has_value() == has_ref, kOp, ": got ", kl.has_value() ? "kl" : "ref_logprobs",
                    " alone; give both kl and ref_logprobs, or neither");
  TORCH_CHECK_VALUE(beta == 0 || kl.has_value(), kOp, ": beta is ", beta, " but kl is None; name an estimator or set beta to 0");
  TORCH_CHECK_VALUE(entropy_coef == 0 || has_entropy, kOp, ": entropy_coef is ", entropy_coef,
                    " but entropy is None; pass entropy [T]");
}

void check_aggregation(const Inputs& in, string_view kind, string_view aggregation, std::optional<int64_t> norm_length) {
  check_name("aggregation", aggregation, {"token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum",
                                          "sequence_mean_token_sum_norm", "group_mean"});
  const bool needs_sequences = is_one_of(kind, {"gspo", "gspo_token"}) || aggregation != "token_mean";
  TORCH_CHECK_VALUE(!needs_sequences || in.starts.defined(), kOp, ": kind ", kind, " with aggregation ", aggregation,
                    " needs cu_seqlens [N + 1]; got None");
  TORCH_CHECK_VALUE(aggregation != "group_mean" || in.sequence_groups.defined(), kOp,
                    ": aggregation group_mean needs sequence_groups [N]; got None");
  TORCH_CHECK_VALUE(aggregation != "sequence_mean_token_sum_norm" || norm_length.value_or(0) >= 1, kOp,
                    ": aggregation sequence_mean_token_sum_norm needs norm_length >= 1 (the maximum response length in tokens); got ",
                    norm_length.has_value() ? std::to_string(*norm_length) : "None");
}

// d loss / d token loss: one number (returned) or, where means are taken per sequence or group, `per_token`.
double coefficients(const Inputs& in, string_view aggregation, std::optional<int64_t> norm_length, double denominator,
                    Tensor& per_token) {
  double base = denominator > 0 ? 1.0 / denominator : 0.0;
  if (aggregation == "sequence_mean_token_sum_norm") base /= static_cast<double>(*norm_length);
  if (is_one_of(aggregation, {"sequence_mean_token_mean", "group_mean"})) {
    const auto counts = mean_counts(in, aggregation == "group_mean");
    per_token = at::empty_like(in.logprobs);
    if (in.logprobs.scalar_type() == at::kDouble) fill_coefficients<double>(in, counts, base, per_token);
    else fill_coefficients<float>(in, counts, base, per_token);
  }
  return base;
}

const void* data_or_null(const Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }

std::tuple<Tensor, Tensor, Tensor, Tensor> policy_loss(
    const Tensor& logprobs, const Tensor& old_logprobs, const Tensor& advantages, const Tensor& loss_mask,
    const std::optional<Tensor>& ref_logprobs, const std::optional<Tensor>& entropy, const std::optional<Tensor>& weights,
    const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& sequence_groups, const Tensor& denominator,
    string_view kind, double clip_low, double clip_high, std::optional<double> dual_clip, std::optional<string_view> kl,
    string_view kl_gradient, double beta, double entropy_coef, string_view aggregation, std::optional<int64_t> norm_length) {
  check_options(kind, clip_low, clip_high, dual_clip, kl, kl_gradient, beta, entropy_coef, ref_logprobs.has_value(),
                entropy.has_value());
  Inputs in(logprobs);
  const auto dtype = logprobs.scalar_type();
  in.old_logprobs = in.per_token("old_logprobs", old_logprobs, dtype);
  in.advantages = in.per_token("advantages", advantages, dtype);
  in.mask = in.per_token("loss_mask", loss_mask, at::kBool);
  if (ref_logprobs.has_value()) in.ref_logprobs = in.per_token("ref_logprobs", *ref_logprobs, dtype);
  if (entropy.has_value()) in.entropy = in.per_token("entropy", *entropy, dtype);
  if (weights.has_value()) in.weights = in.per_token("weights", *weights, dtype);
  in.set_sequences(cu_seqlens, sequence_groups);
  check_aggregation(in, kind, aggregation, norm_length);
  TORCH_CHECK_VALUE(denominator.numel() == 1, kOp, ": denominator is ", denominator.sizes(), "; it must be one number");
  const double count = denominator.item().toDouble();
  TORCH_CHECK_VALUE(count >= 0 && std::isfinite(count), kOp, ": denominator is ", count,
                    "; it must be a finite count, at least 0 (0 = nothing in the loss anywhere, which gives loss 0)");

  const bool is_double = dtype == at::kDouble, is_gspo = kind == "gspo";
  Tensor share, grad_ratio;
  SequenceRatio sequences;
  Tensor grad_logprobs = at::empty_like(in.logprobs);
  Tensor grad_entropy = entropy_coef != 0 ? at::empty_like(in.entropy) : at::empty({0}, in.logprobs.options());
  PolicyTokens tokens{};
  tokens.coefficient = coefficients(in, aggregation, norm_length, count, share);
  if (is_gspo || kind == "gspo_token") {
    sequences = is_double ? sequence_ratio<double>(in) : sequence_ratio<float>(in);
    if (is_gspo) grad_ratio = at::empty_like(in.logprobs);
  }
  tokens.logprobs = in.logprobs.const_data_ptr();
  tokens.old_logprobs = in.old_logprobs.const_data_ptr();
  tokens.advantages = in.advantages.const_data_ptr();
  tokens.mask = static_cast<const uint8_t*>(in.mask.const_data_ptr());
  tokens.ref_logprobs = data_or_null(in.ref_logprobs);
  tokens.entropy = data_or_null(in.entropy);
  tokens.weights = data_or_null(in.weights);
  tokens.coefficients = data_or_null(share);
  tokens.sequence_ratio = data_or_null(sequences.per_token);
  tokens.grad_logprobs = grad_logprobs.mutable_data_ptr();
  tokens.grad_ratio = grad_ratio.defined() ? grad_ratio.mutable_data_ptr() : nullptr;
  tokens.grad_entropy = entropy_coef != 0 ? grad_entropy.mutable_data_ptr() : nullptr;
  tokens.clip_low = clip_low;
  tokens.clip_high = clip_high;
  tokens.dual_clip = dual_clip.value_or(0.0);
  tokens.beta = beta;
  tokens.entropy_coef = entropy_coef;
  tokens.kind = kind == "cispo" ? PolicyKind::kCispo : kind == "reinforce" ? PolicyKind::kReinforce : PolicyKind::kMin;
  tokens.kl = !kl.has_value() ? KlKind::kNone : *kl == "k1" ? KlKind::kK1 : *kl == "k2" ? KlKind::kK2 : KlKind::kK3;
  tokens.kl_gradient = kl_gradient == "direct" ? KlGradient::kDirect : kl_gradient == "k2" ? KlGradient::kK2 : KlGradient::kImportance;

  const PolicySums sums = run_chunks(tokens, is_double ? Element::kDouble : Element::kFloat, in.tokens);
  if (is_gspo) {
    if (is_double) add_sequence_gradient<double>(in, sequences, grad_ratio, grad_logprobs);
    else add_sequence_gradient<float>(in, sequences, grad_ratio, grad_logprobs);
  }
  return {at::scalar_tensor(sums.loss, in.logprobs.options()), metrics_tensor(sums), grad_logprobs, grad_entropy};
}

}  // namespace

TORCH_LIBRARY_IMPL(grpo_mc, CPU, m) { m.impl("policy_loss", policy_loss); }

}  // namespace grpo_mc
