// rms_norm: checks, and on the CPU one kernel call per row.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/kernels.h"
#include "drivers/checks.h"
#include "drivers/device.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0), "rms_norm: x is ", x.sizes(),
                    " and weight ", weight.sizes(), "; they must be [..., H] and [H]");
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat, "rms_norm: x is ", x.scalar_type(),
                    " and weight ", weight.scalar_type(), "; the operator takes Float");
  check_finite("rms_norm", "eps", eps);
  TORCH_CHECK_VALUE(eps >= 0, "rms_norm: eps is ", eps, "; it must be at least 0");
  const Tensor rows = x.contiguous(), scale = weight.contiguous();
  Tensor out = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
  if (out.numel() == 0) return out;
  RmsNorm p{};
  p.x = rows.const_data_ptr<float>();
  p.weight = scale.const_data_ptr<float>();
  p.out = out.mutable_data_ptr<float>();
  p.width = weight.size(0);
  p.rows = out.numel() / p.width;
  p.eps = eps;
  if (runs_on_cuda(x)) {
    launch("rms_norm", &CudaKernels::rms_norm, p, x);
    return out;
  }
  const int64_t grain = std::max<int64_t>(1, 32768 / p.width);  // a handful of rows is not worth another thread
  parallel_for(p.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      GRPO_MC_KERNEL(rms_norm_row)(p.x + row * p.width, p.weight, p.out + row * p.width, p.width, p.eps);
  });
  return out;
}

}  // namespace

GRPO_MC_OPERATORS(m) { m.impl("rms_norm", rms_norm); }

}  // namespace grpo_mc
