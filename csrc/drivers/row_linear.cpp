// row_linear: checks, and on the CPU one kernel call per stretch of output columns.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "drivers/device.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

Tensor row_linear(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), "row_linear: x is ", x.sizes(),
                    " and weight ", weight.sizes(), "; they must be [M, K] and [N, K]");
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat, "row_linear: x is ",
                    x.scalar_type(), " and weight ", weight.scalar_type(), "; the operator takes Float");
  const Tensor rows = x.stride(1) == 1 ? x : x.contiguous();
  const Tensor columns = weight.stride(1) == 1 ? weight : weight.contiguous();
  Tensor out = at::empty({x.size(0), weight.size(0)}, x.options().memory_format(at::MemoryFormat::Contiguous));
  RowLinear p{};
  p.x = rows.const_data_ptr<float>();
  p.weight = columns.const_data_ptr<float>();
  p.out = out.mutable_data_ptr<float>();
  p.rows = x.size(0);
  p.columns = weight.size(0);
  p.depth = x.size(1);
  p.x_stride = rows.stride(0);
  p.weight_stride = columns.stride(0);
  p.out_stride = weight.size(0);
  if (runs_on_cuda(x)) {
    if (out.numel() > 0) launch("row_linear", &CudaKernels::row_linear, p, x);
    return out;
  }
  const int64_t num_columns = weight.size(0), num_groups = (num_columns + kRowLinearGroup - 1) / kRowLinearGroup;
  parallel_for(num_groups, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(static_cast<size_t>(p.rows * kRowLinearGroup));
    const int64_t last = std::min(end * kRowLinearGroup, num_columns);
    GRPO_MC_KERNEL(row_linear_columns)(p, scratch.data(), begin * kRowLinearGroup, last);
  });
  return out;
}

}  // namespace

GRPO_MC_OPERATORS(m) { m.impl("row_linear", row_linear); }

}  // namespace grpo_mc
