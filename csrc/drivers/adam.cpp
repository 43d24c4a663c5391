// adam_step: checks, and on the CPU one kernel call per range of entries, or per block of codes.
#include <torch/library.h>

#include <optional>

#include "common/adam.h"
#include "cpu/kernels.h"
#include "drivers/checks.h"
#include "drivers/device.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

constexpr const char* kOp = "adam_step";
constexpr int64_t kGrainEntries = 16384;

void check_written(const char* name, const Tensor& x, at::ScalarType dtype, int64_t entries) {
  TORCH_CHECK_VALUE(x.scalar_type() == dtype && x.numel() == entries, kOp, ": ", name, " is ", x.scalar_type(), " ", x.sizes(),
                    "; it must be ", dtype, " with ", entries, " entries");
  TORCH_CHECK_VALUE(x.is_contiguous(), kOp, ": ", name, " has strides ", x.strides(),
                    "; it is written in place and must be contiguous");
}

void check_at_least_zero(const char* name, double value) {
  check_finite(kOp, name, value);
  TORCH_CHECK_VALUE(value >= 0.0, kOp, ": ", name, " is ", value, "; it must be at least 0");
}

void check_numbers(double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step, double grad_scale, double clip_coef) {
  check_at_least_zero("lr", lr);
  check_at_least_zero("eps", eps);
  check_at_least_zero("weight_decay", weight_decay);
  check_at_least_zero("clip_coef", clip_coef);
  TORCH_CHECK_VALUE(std::isfinite(grad_scale) && grad_scale > 0.0, kOp, ": grad_scale is ", grad_scale, "; it must be finite and above 0");
  TORCH_CHECK_VALUE(0.0 <= beta1 && beta1 < 1.0 && 0.0 <= beta2 && beta2 < 1.0, kOp, ": betas are ", beta1, " and ", beta2,
                    "; both must be at least 0 and below 1");
  TORCH_CHECK_VALUE(step >= 1, kOp, ": step is ", step, "; it must be at least 1 (the first step is 1)");
}

// Bits of a moment, by the state's dtype and shape.
int state_bits(const Tensor& exp_avg, int64_t blocks) {
  if (exp_avg.scalar_type() == at::kFloat) return 32;
  TORCH_CHECK_VALUE(exp_avg.scalar_type() == at::kByte && (exp_avg.numel() == blocks * kAdamBlock || exp_avg.numel() == blocks * kAdamHalf), kOp,
                    ": exp_avg is ", exp_avg.scalar_type(), " ", exp_avg.sizes(), "; it must be Float like params, or codes, Byte [", blocks,
                    ", 128] (8 bits) or [", blocks, ", 64] (4 bits)");
  return exp_avg.numel() == blocks * kAdamBlock ? 8 : 4;
}

void adam_step_(Tensor& params, const Tensor& grads, Tensor& exp_avg, Tensor& exp_avg_sq, const std::optional<Tensor>& exp_avg_scale,
                const std::optional<Tensor>& exp_avg_sq_scale, const std::optional<Tensor>& out_bf16, double lr, double beta1, double beta2,
                double eps, double weight_decay, int64_t step, double grad_scale, double clip_coef, int64_t seed, int64_t offset) {
  check_numbers(lr, beta1, beta2, eps, weight_decay, step, grad_scale, clip_coef);
  const int64_t n = params.numel(), blocks = (n + kAdamBlock - 1) / kAdamBlock;
  TORCH_CHECK_VALUE(offset >= 0 && offset % kAdamBlock == 0, kOp, ": offset is ", offset, "; it must be a multiple of 128, at least 0");
  const Tensor out = out_bf16.value_or(Tensor()), scale = exp_avg_scale.value_or(Tensor()), scale_sq = exp_avg_sq_scale.value_or(Tensor());
  const int bits = state_bits(exp_avg, blocks);
  TORCH_CHECK_VALUE(scale.defined() == (bits != 32) && scale_sq.defined() == (bits != 32), kOp,
                    ": a state of codes has scales and a state of Float has none; use a state from adam_state");
  check_written("params", params, at::kFloat, n);
  const int64_t stored = bits == 32 ? n : blocks * kAdamBlock * bits / 8;
  check_written("exp_avg", exp_avg, exp_avg.scalar_type(), stored);
  check_written("exp_avg_sq", exp_avg_sq, exp_avg.scalar_type(), stored);
  if (bits != 32) check_written("exp_avg_scale", scale, at::kFloat, blocks);
  if (bits != 32) check_written("exp_avg_sq_scale", scale_sq, at::kFloat, 2 * blocks);
  if (out.defined()) check_written("out_bf16", out, at::kBFloat16, n);
  TORCH_CHECK_VALUE(grads.sizes() == params.sizes(), kOp, ": grads have shape ", grads.sizes(), "; they must have that of params, ", params.sizes());
  check_no_overlap(kOp, "params", params, {grads, exp_avg, exp_avg_sq, scale, scale_sq, out});
  check_no_overlap(kOp, "exp_avg", exp_avg, {grads, exp_avg_sq, scale, scale_sq, out});
  check_no_overlap(kOp, "exp_avg_sq", exp_avg_sq, {grads, scale, scale_sq, out});
  if (bits != 32) check_no_overlap(kOp, "exp_avg_scale", scale, {grads, scale_sq, out});
  if (bits != 32) check_no_overlap(kOp, "exp_avg_sq_scale", scale_sq, {grads, out});
  if (out.defined()) check_no_overlap(kOp, "out_bf16", out, {grads});
  const Tensor from = grads.contiguous();
  AdamStep p{};
  p.dtype = element_of(kOp, "grads", from, false);
  p.params = params.mutable_data_ptr<float>();
  p.grads = from.const_data_ptr();
  p.exp_avg = exp_avg.mutable_data_ptr();
  p.exp_avg_sq = exp_avg_sq.mutable_data_ptr();
  p.exp_avg_scale = scale.defined() ? scale.mutable_data_ptr<float>() : nullptr;
  p.exp_avg_sq_scale = scale_sq.defined() ? scale_sq.mutable_data_ptr<float>() : nullptr;
  p.out = out.defined() ? static_cast<uint16_t*>(out.mutable_data_ptr()) : nullptr;
  p.n = n;
  p.seed = static_cast<uint64_t>(seed);
  p.step = static_cast<uint64_t>(step);
  p.offset = static_cast<uint64_t>(offset);
  p.bits = bits;
  p.factors = adam_factors(lr, beta1, beta2, eps, weight_decay, step, grad_scale, clip_coef);
  if (n == 0) return;
  if (runs_on_cuda(params)) return launch(kOp, &CudaKernels::adam_step, p, params);
  if (bits == 32) {
    parallel_for(n, kGrainEntries, [&](int64_t begin, int64_t end) { GRPO_MC_KERNEL(adam_step_range)(p, begin, end); });
  } else {
    parallel_for(blocks, kGrainEntries / kAdamBlock, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) GRPO_MC_KERNEL(adam_step_block)(p, i);
    });
  }
}

}  // namespace

GRPO_MC_OPERATORS(m) { m.impl("adam_step_", adam_step_); }

}  // namespace grpo_mc
