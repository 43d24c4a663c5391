// token_logprobs: checks, and on the CPU one row kernel per token. The arithmetic is in {cpu,cuda}/token_logprobs.*.
//
// Targets on a GPU are not read here, which would wait for the device: one out of range makes its row's results NaN.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <optional>
#include <tuple>

#include "common/numerics.h"
#include "common/softmax.h"
#include "cpu/kernels.h"
#include "drivers/checks.h"
#include "drivers/device.h"
#include "drivers/memory.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

// Output vector that takes float64 values and stores float32, or float64 for float64 logits.
struct Out {
  Out(int64_t size, const at::TensorOptions& options) : tensor(at::empty({size}, options)) {
    if (tensor.scalar_type() == at::kDouble) wide = tensor.mutable_data_ptr<double>();
    else narrow = tensor.mutable_data_ptr<float>();
  }
  void set(int64_t t, double value) const {
    if (wide != nullptr) wide[t] = value;
    else narrow[t] = static_cast<float>(value);
  }
  void* data() const { return tensor.numel() > 0 ? tensor.mutable_data_ptr() : nullptr; }

  Tensor tensor;
  double* wide = nullptr;
  float* narrow = nullptr;
};

// One shard of logits, [T, columns]: column j is token vocab_start + j, and counts when that is below vocab_size.
struct Shard {
  Shard(const char* op, const Tensor& logits_, const Tensor& targets_, int64_t start_, int64_t vocab_size_, double temperature)
      : start(start_), vocab_size(vocab_size_), inv_temperature(1.0 / temperature) {
    TORCH_CHECK_VALUE(logits_.dim() == 2, op, ": logits has shape ", logits_.sizes(), "; it must be [T, V]");
    TORCH_CHECK_VALUE(temperature > 0 && std::isfinite(temperature), op, ": temperature is ", temperature,
                      "; it must be positive and finite (greedy sampling has no log-probs to train on)");
    // The kernels scale in float32, where 1e-39 is a temperature of 0 and 1e46 one of infinity.
    const float narrow = static_cast<float>(inv_temperature);
    TORCH_CHECK_VALUE(narrow > 0 && std::isfinite(narrow), op, ": temperature is ", temperature,
                      ", whose inverse float32 cannot hold; it must lie between 1e-38 and 1e38");
    TORCH_CHECK_VALUE(start >= 0 && vocab_size > 0, op, ": vocab_start is ", start, " and vocab_size is ", vocab_size,
                      "; they must be at least 0 and 1");
    dtype = element_of(op, "logits", logits_, /*allow_double=*/true);
    logits = logits_.stride(1) == 1 || logits_.numel() == 0 ? logits_ : logits_.contiguous();
    tokens = logits.size(0);
    columns = logits.size(1);
    valid = std::max<int64_t>(0, std::min(columns, vocab_size - start));
    check_vector(op, "targets", targets_, tokens, at::kLong);
    targets = targets_.contiguous();
  }

  const char* row(int64_t t) const {
    return static_cast<const char*>(logits.const_data_ptr()) + t * logits.stride(0) * logits.element_size();
  }

  // Column of token t's target, or -1 when another shard has it.
  int64_t column(int64_t t) const {
    const int64_t j = targets.const_data_ptr<int64_t>()[t] - start;
    return j >= 0 && j < valid ? j : -1;
  }

  double logit(int64_t t, int64_t column) const {
    if (dtype == Element::kDouble) return reinterpret_cast<const double*>(row(t))[column];
    if (dtype == Element::kFloat) return reinterpret_cast<const float*>(row(t))[column];
    return bf16_to_float(reinterpret_cast<const uint16_t*>(row(t))[column]);
  }

  at::ScalarType out_dtype() const { return dtype == Element::kDouble ? at::kDouble : at::kFloat; }

  TokenRows rows() const {
    return {logits.const_data_ptr(), targets.const_data_ptr<int64_t>(), tokens, columns, valid, logits.stride(0), start, vocab_size,
            inv_temperature, dtype};
  }

  Out vector(at::ScalarType kind, bool wanted = true) const { return Out(wanted ? tokens : 0, logits.options().dtype(kind)); }

  Tensor logits, targets;
  int64_t start, vocab_size, tokens = 0, columns = 0, valid = 0;
  double inv_temperature;
  Element dtype = Element::kFloat;
};

void check_targets(const char* op, const Tensor& targets, int64_t vocab_size) {
  const int64_t* target = targets.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < targets.size(0); ++t) {
    TORCH_CHECK_VALUE(target[t] >= 0 && target[t] < vocab_size, op, ": targets[", t, "] is ", target[t],
                      "; it must lie in [0, ", vocab_size, "), the vocabulary without padding");
  }
}

std::tuple<Tensor, Tensor, Tensor> token_logprobs(const Tensor& logits, const Tensor& targets, double temperature,
                                                  int64_t vocab_size, bool with_entropy, bool inplace_backward) {
  const char* op = "token_logprobs";
  const Shard s(op, logits, targets, 0, vocab_size, temperature);
  TORCH_CHECK_VALUE(vocab_size <= s.columns, op, ": vocab_size is ", vocab_size, " but logits has ", s.columns, " columns");
  TORCH_CHECK_VALUE(!inplace_backward || s.logits.is_same(logits), op,
                    ": inplace_backward needs logits whose columns are adjacent in memory; got strides ", logits.strides());
  const Out logprobs = s.vector(s.out_dtype()), entropy = s.vector(s.out_dtype(), with_entropy), lse = s.vector(at::kDouble);
  if (runs_on_cuda(logits)) {
    TokenStats p{.rows = s.rows(), .logprobs = logprobs.data(), .entropy = entropy.data(), .lse = lse.wide};
    if (s.tokens > 0) launch(op, &CudaKernels::token_logprobs, p, logits);
    return {logprobs.tensor, entropy.tensor, lse.tensor};
  }
  check_targets(op, s.targets, vocab_size);
  parallel_for(s.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const RowStats r = GRPO_MC_KERNEL(row_stats)(s.row(t), s.dtype, s.valid, s.inv_temperature, with_entropy);
      const TokenResult result = token_result(r, s.logit(t, s.column(t)), s.inv_temperature);
      logprobs.set(t, result.logprob);
      if (with_entropy) entropy.set(t, result.entropy);
      lse.set(t, result.lse);
    }
  });
  return {logprobs.tensor, entropy.tensor, lse.tensor};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> token_logprob_stats(const Tensor& logits, const Tensor& targets,
                                                               int64_t vocab_start, int64_t vocab_size, double temperature) {
  const char* op = "token_logprob_stats";
  const Shard s(op, logits, targets, vocab_start, vocab_size, temperature);
  const Out max = s.vector(s.out_dtype()), sumexp = s.vector(s.out_dtype()), sum_p_logit = s.vector(s.out_dtype()),
            target_logit = s.vector(s.out_dtype());
  if (runs_on_cuda(logits)) {
    TokenStats p{.rows = s.rows(), .max = max.data(), .sumexp = sumexp.data(), .sum_p_logit = sum_p_logit.data(), .target_logit = target_logit.data()};
    if (s.tokens > 0) launch(op, &CudaKernels::token_logprobs, p, logits);
    return {max.tensor, sumexp.tensor, sum_p_logit.tensor, target_logit.tensor};
  }
  check_targets(op, s.targets, vocab_size);
  parallel_for(s.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const RowStats r = GRPO_MC_KERNEL(row_stats)(s.row(t), s.dtype, s.valid, s.inv_temperature, true);
      const int64_t column = s.column(t);
      max.set(t, r.max * s.inv_temperature);
      sumexp.set(t, r.sum);
      sum_p_logit.set(t, r.sum_z);
      target_logit.set(t, column < 0 ? 0.0 : s.logit(t, column) * s.inv_temperature);
    }
  });
  return {max.tensor, sumexp.tensor, sum_p_logit.tensor, target_logit.tensor};
}

struct Backward {
  const Tensor &lse, &grad_logprobs;
  const std::optional<Tensor>&entropy, &grad_entropy;
};

Tensor per_token(const char* op, const char* name, const Tensor& x, int64_t tokens) {
  TORCH_CHECK_VALUE(x.dim() == 1 && x.size(0) == tokens, op, ": ", name, " has shape ", x.sizes(), "; it must be [", tokens, "]");
  return x.to(at::kDouble).contiguous();
}

void run_backward(const char* op, const Shard& s, const Backward& b, const Tensor& out) {
  TORCH_CHECK_VALUE(!b.grad_entropy.has_value() || b.entropy.has_value(), op, ": grad_entropy needs entropy");
  const Tensor lse = per_token(op, "lse", b.lse, s.tokens), grad = per_token(op, "grad_logprobs", b.grad_logprobs, s.tokens);
  Tensor entropy, grad_entropy;
  if (b.grad_entropy.has_value()) {
    entropy = per_token(op, "entropy", *b.entropy, s.tokens);
    grad_entropy = per_token(op, "grad_entropy", *b.grad_entropy, s.tokens);
  }
  if (runs_on_cuda(out)) {
    TokenGrads p{s.rows(), out.mutable_data_ptr(), out.stride(0), lse.const_data_ptr<double>(), grad.const_data_ptr<double>(), nullptr, nullptr};
    if (entropy.defined()) p.entropy = entropy.const_data_ptr<double>();
    if (entropy.defined()) p.grad_entropy = grad_entropy.const_data_ptr<double>();
    if (out.numel() > 0) launch(op, &CudaKernels::token_logprobs_backward, p, out);
    return;
  }
  char* out_data = static_cast<char*>(out.mutable_data_ptr());
  const int64_t out_stride = out.stride(0) * out.element_size();
  parallel_for(s.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      RowGrad row{};
      row.logits = s.row(t);
      row.out = out_data + t * out_stride;
      row.num_valid = s.valid;
      row.num_columns = s.columns;
      row.target = s.column(t);
      row.inv_temperature = s.inv_temperature;
      row.lse = lse.const_data_ptr<double>()[t];
      row.grad_logprob = grad.const_data_ptr<double>()[t];
      row.entropy = entropy.defined() ? entropy.const_data_ptr<double>()[t] : 0.0;
      row.grad_entropy = grad_entropy.defined() ? grad_entropy.const_data_ptr<double>()[t] : 0.0;
      GRPO_MC_KERNEL(row_grad)(row, s.dtype);
    }
  });
}

Tensor token_logprobs_backward(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                               const std::optional<Tensor>& entropy, const Tensor& grad_logprobs,
                               const std::optional<Tensor>& grad_entropy, double temperature, int64_t vocab_start,
                               int64_t vocab_size) {
  const Shard s("token_logprobs_backward", logits, targets, vocab_start, vocab_size, temperature);
  const Tensor out = at::empty(s.logits.sizes(), s.logits.options());
  if (out.is_cpu()) advise_huge_pages(out.mutable_data_ptr(), out.nbytes());
  run_backward("token_logprobs_backward", s, {lse, grad_logprobs, entropy, grad_entropy}, out);
  return out;
}

void token_logprobs_backward_(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                              const std::optional<Tensor>& entropy, const Tensor& grad_logprobs,
                              const std::optional<Tensor>& grad_entropy, double temperature, int64_t vocab_start,
                              int64_t vocab_size) {
  const Shard s("token_logprobs_backward_", logits, targets, vocab_start, vocab_size, temperature);
  TORCH_CHECK_VALUE(s.logits.is_same(logits), "token_logprobs_backward_: writing over the logits needs columns adjacent in "
                    "memory; got strides ", logits.strides(), "; use inplace=False");
  run_backward("token_logprobs_backward_", s, {lse, grad_logprobs, entropy, grad_entropy}, logits);
}

}  // namespace

GRPO_MC_OPERATORS(m) {
  m.impl("token_logprobs", token_logprobs);
  m.impl("token_logprob_stats", token_logprob_stats);
  m.impl("token_logprobs_backward", token_logprobs_backward);
  m.impl("token_logprobs_backward_", token_logprobs_backward_);
}

}  // namespace grpo_mc
