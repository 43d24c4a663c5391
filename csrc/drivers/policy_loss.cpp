// policy_loss: on the CPU the aggregation coefficients and sequence ratios are computed here and tokens are cut into fixed
// chunks whose sums are added in order, so the result does not depend on the number of threads. On a GPU kernels do all of
// it, and nothing waits for the device. The arithmetic of a token is in common/policy_loss.h.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "common/policy_loss.h"
#include "cpu/kernels.h"
#include "drivers/parallel.h"
#include "drivers/policy_loss_inputs.h"

namespace grpo_mc {
namespace {

using at::Tensor;
using std::string_view;
constexpr int64_t kChunk = 2048;  // tokens
constexpr int64_t kMetrics = 8;

int64_t masked_count(const PolicyInputs& in, int64_t sequence) {
  const auto* mask = static_cast<const bool*>(in.mask.const_data_ptr());
  int64_t count = 0;
  for (int64_t t = in.start(sequence); t < in.start(sequence + 1); ++t) count += mask[t];
  return count;
}

// Tokens in the loss of each sequence, or of the sequence's whole group.
std::vector<int64_t> mean_counts(const PolicyInputs& in, bool by_group) {
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
void fill_coefficients(const PolicyInputs& in, const std::vector<int64_t>& counts, double base, Tensor& out) {
  T* data = out.mutable_data_ptr<T>();
  for (int64_t i = 0; i < in.num_sequences; ++i) {
    const int64_t count = counts[static_cast<size_t>(i)];
    const T value = static_cast<T>(count > 0 ? base / static_cast<double>(count) : 0.0);
    for (int64_t t = in.start(i); t < in.start(i + 1); ++t) data[t] = value;
  }
}

// exp of each sequence's mean log-ratio over its masked tokens, at every token of the sequence.
struct SequenceRatios {
  std::vector<SequenceRatio> of_sequence;
  Tensor per_token;
};

template <typename T>
SequenceRatios sequence_ratios(const PolicyInputs& in) {
  SequenceRatios out{std::vector<SequenceRatio>(static_cast<size_t>(in.num_sequences)), at::empty_like(in.logprobs)};
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
      const SequenceRatio ratio = sequence_ratio(sum, static_cast<double>(count));
      out.of_sequence[static_cast<size_t>(i)] = ratio;
      for (int64_t t = in.start(i); t < in.start(i + 1); ++t) per_token[t] = static_cast<T>(ratio.value);
    }
  });
  return out;
}

// gspo: every masked token of a sequence moves the ratio of all of them.
template <typename T>
void add_sequence_gradient(const PolicyInputs& in, const SequenceRatios& sequences, const Tensor& grad_ratio, Tensor& grad_logprobs) {
  const T* by_ratio = grad_ratio.const_data_ptr<T>();
  T* grad = grad_logprobs.mutable_data_ptr<T>();
  const auto* mask = static_cast<const bool*>(in.mask.const_data_ptr());
  parallel_for(in.num_sequences, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double total = 0;
      for (int64_t t = in.start(i); t < in.start(i + 1); ++t) total += by_ratio[t];
      const T share = static_cast<T>(total * sequences.of_sequence[static_cast<size_t>(i)].slope);
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
  Tensor out = at::empty({kMetrics}, at::TensorOptions().dtype(at::kDouble));
  const double values[kMetrics] = {s.token_count, s.ratio, s.clip_low, s.clip_high, s.dual_clip, s.kl, s.entropy, s.policy_loss};
  std::copy(values, values + kMetrics, out.mutable_data_ptr<double>());
  return out;
}

// `per_token`: d loss / d token loss of each token, where means are taken per sequence or group.
Tensor coefficients(const PolicyInputs& in, PolicyMean mean, double base) {
  if (mean == PolicyMean::kNone) return {};
  const auto counts = mean_counts(in, mean == PolicyMean::kGroup);
  Tensor per_token = at::empty_like(in.logprobs);
  if (in.logprobs.scalar_type() == at::kDouble) fill_coefficients<double>(in, counts, base, per_token);
  else fill_coefficients<float>(in, counts, base, per_token);
  return per_token;
}

const void* data_or_null(const Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }

PolicyMean mean_of(string_view aggregation) {
  return aggregation == "sequence_mean_token_mean" ? PolicyMean::kSequence
         : aggregation == "group_mean"             ? PolicyMean::kGroup
                                                   : PolicyMean::kNone;
}

// What a call works on, whatever the device.
struct Call {
  const PolicyInputs& in;
  PolicyTokens tokens{};
  PolicyMean mean = PolicyMean::kNone;
  Tensor grad_logprobs, grad_ratio, grad_entropy, denominator;

  bool is_double() const { return in.logprobs.scalar_type() == at::kDouble; }
  Element dtype() const { return is_double() ? Element::kDouble : Element::kFloat; }
};

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;

double checked_share(double denominator) {
  TORCH_CHECK_VALUE(denominator >= 0 && std::isfinite(denominator), kPolicyLoss, ": denominator is ", denominator,
                    "; it must be a finite count, at least 0 (0 = nothing in the loss anywhere, which gives loss 0)");
  return share_of_denominator(denominator);
}

Result run_on_cpu(Call& call) {
  const PolicyInputs& in = call.in;
  PolicyTokens& tokens = call.tokens;
  const Tensor share = coefficients(in, call.mean, tokens.coefficient);
  SequenceRatios sequences;
  if (tokens.has_sequence_ratio) sequences = call.is_double() ? sequence_ratios<double>(in) : sequence_ratios<float>(in);
  tokens.coefficients = data_or_null(share);
  tokens.sequence_ratio = data_or_null(sequences.per_token);
  const PolicySums sums = run_chunks(tokens, call.dtype(), in.tokens);
  if (call.grad_ratio.defined()) {
    if (call.is_double()) add_sequence_gradient<double>(in, sequences, call.grad_ratio, call.grad_logprobs);
    else add_sequence_gradient<float>(in, sequences, call.grad_ratio, call.grad_logprobs);
  }
  return {at::scalar_tensor(sums.loss, in.logprobs.options()), metrics_tensor(sums), call.grad_logprobs, call.grad_entropy};
}

Result run_on_cuda(const Call& call) {
  const PolicyInputs& in = call.in;
  const auto wide = in.logprobs.options().dtype(at::kDouble);
  const Tensor loss = at::empty({}, in.logprobs.options()), metrics = at::empty({kMetrics}, wide);
  const int64_t num_parts = (in.tokens + kPolicyPart - 1) / kPolicyPart;
  const Tensor parts = at::empty({num_parts, kMetrics + 1}, wide);
  PolicyCall p{};
  p.tokens = call.tokens;
  p.denominator = call.denominator.defined() ? call.denominator.const_data_ptr<double>() : nullptr;
  p.loss = loss.mutable_data_ptr();
  p.metrics = metrics.mutable_data_ptr<double>();
  p.parts = parts.numel() > 0 ? parts.mutable_data_ptr<double>() : nullptr;
  p.num_tokens = in.tokens;
  p.dtype = call.dtype();
  Tensor of_sequences, counts;
  if (call.mean != PolicyMean::kNone || call.tokens.has_sequence_ratio) {
    of_sequences = at::empty({3, in.num_sequences + 1}, wide);
    counts = at::empty({in.num_sequences + 1}, wide.dtype(at::kLong));
    double* workspace = of_sequences.mutable_data_ptr<double>();
    p.sequences = {.starts = in.starts.const_data_ptr<int64_t>(),
                   .groups = in.sequence_groups.defined() && in.num_sequences > 0 ? in.sequence_groups.const_data_ptr<int64_t>() : nullptr,
                   .tokens = counts.mutable_data_ptr<int64_t>(),
                   .coefficient = workspace,
                   .ratio = workspace + (in.num_sequences + 1),
                   .slope = workspace + 2 * (in.num_sequences + 1),
                   .count = in.num_sequences,
                   .mean = call.mean};
  }
  launch(kPolicyLoss, &CudaKernels::policy_loss, p, in.logprobs);
  return {loss, metrics, call.grad_logprobs, call.grad_entropy};
}

Result policy_loss(
    const Tensor& logprobs, const Tensor& old_logprobs, const Tensor& advantages, const Tensor& loss_mask,
    const std::optional<Tensor>& ref_logprobs, const std::optional<Tensor>& entropy, const std::optional<Tensor>& weights,
    const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& sequence_groups, const Tensor& denominator,
    string_view kind, double clip_low, double clip_high, std::optional<double> dual_clip, std::optional<string_view> kl,
    string_view kl_gradient, double beta, double entropy_coef, string_view aggregation, std::optional<int64_t> norm_length) {
  check_options(kind, clip_low, clip_high, dual_clip, kl, kl_gradient, beta, entropy_coef, ref_logprobs.has_value(),
                entropy.has_value());
  PolicyInputs in(logprobs);
  const auto dtype = logprobs.scalar_type();
  in.old_logprobs = in.per_token("old_logprobs", old_logprobs, dtype);
  in.advantages = in.per_token("advantages", advantages, dtype);
  in.mask = in.per_token("loss_mask", loss_mask, at::kBool);
  if (ref_logprobs.has_value()) in.ref_logprobs = in.per_token("ref_logprobs", *ref_logprobs, dtype);
  if (entropy.has_value()) in.entropy = in.per_token("entropy", *entropy, dtype);
  if (weights.has_value()) in.weights = in.per_token("weights", *weights, dtype);
  in.set_sequences(cu_seqlens, sequence_groups);
  check_aggregation(in, kind, aggregation, norm_length);
  TORCH_CHECK_VALUE(denominator.numel() == 1, kPolicyLoss, ": denominator is ", denominator.sizes(), "; it must be one number");
  TORCH_CHECK_VALUE(denominator.is_cpu() || denominator.device() == logprobs.device(), kPolicyLoss, ": denominator is on ",
                    denominator.device(), " but logprobs on ", logprobs.device(), "; keep it on the CPU or on the device of the others");

  Call call{in};
  PolicyTokens& tokens = call.tokens;
  const bool is_gspo = kind == "gspo";
  call.mean = mean_of(aggregation);
  if (runs_on_cuda(denominator)) call.denominator = denominator.to(at::kDouble);
  tokens.coefficient = call.denominator.defined() ? 1.0 : checked_share(denominator.item().toDouble());
  if (aggregation == "sequence_mean_token_sum_norm") tokens.coefficient /= static_cast<double>(*norm_length);
  call.grad_logprobs = at::empty_like(in.logprobs);
  if (is_gspo) call.grad_ratio = at::empty_like(in.logprobs);
  call.grad_entropy = entropy_coef != 0 ? at::empty_like(in.entropy) : at::empty({0}, in.logprobs.options());
  tokens.logprobs = in.logprobs.const_data_ptr();
  tokens.old_logprobs = in.old_logprobs.const_data_ptr();
  tokens.advantages = in.advantages.const_data_ptr();
  tokens.mask = static_cast<const uint8_t*>(in.mask.const_data_ptr());
  tokens.ref_logprobs = data_or_null(in.ref_logprobs);
  tokens.entropy = data_or_null(in.entropy);
  tokens.weights = data_or_null(in.weights);
  tokens.grad_logprobs = call.grad_logprobs.mutable_data_ptr();
  tokens.grad_ratio = is_gspo ? call.grad_ratio.mutable_data_ptr() : nullptr;
  tokens.grad_entropy = entropy_coef != 0 ? call.grad_entropy.mutable_data_ptr() : nullptr;
  tokens.clip_low = clip_low;
  tokens.clip_high = clip_high;
  tokens.dual_clip = dual_clip.value_or(0.0);
  tokens.beta = beta;
  tokens.entropy_coef = entropy_coef;
  tokens.kind = kind == "cispo" ? PolicyKind::kCispo : kind == "reinforce" ? PolicyKind::kReinforce : PolicyKind::kMin;
  tokens.kl = !kl.has_value() ? KlKind::kNone : *kl == "k1" ? KlKind::kK1 : *kl == "k2" ? KlKind::kK2 : KlKind::kK3;
  tokens.kl_gradient = kl_gradient == "direct" ? KlGradient::kDirect : kl_gradient == "k2" ? KlGradient::kK2 : KlGradient::kImportance;
  tokens.has_sequence_ratio = is_gspo || kind == "gspo_token";
  return runs_on_cuda(logprobs) ? run_on_cuda(call) : run_on_cpu(call);
}

}  // namespace

GRPO_MC_OPERATORS(m) { m.impl("policy_loss", policy_loss); }

}  // namespace grpo_mc
