// row_linear on the CPU: checks, and one kernel call per block of output columns.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

Tensor row_linear(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), "row_linear: x is ", x.sizes(),
                    " and weight ", weight.sizes(), "; they must be [M, K] and [N, K]");
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat, "row_linear: x is ",
                    x.scalar_type(), " and weight ", weight.scalar_type(), "; the CPU operator takes Float");
  const Tensor rows = x.stride(1) == 1 ? x : x.contiguous();
  const Tensor columns = weight.stride(1) == 1 ? weight : weight.contiguous();
  Tensor out = at::empty({x.size(0), weight.size(0)}, x.options().memory_format(at::MemoryFormat::Contiguous));
  RowLinear p{};
  p.x = rows.const_data_ptr<float>();
  p.weight = columns.const_data_ptr<float>();
  p.out = out.mutable_data_ptr<float>();
  p.rows = x.size(0);
  p.depth = x.size(1);
  p.x_stride = rows.stride(0);
  p.weight_stride = columns.stride(0);
  p.out_stride = weight.size(0);
  // A block of 8 weight rows stays in the L1 cache while all rows of x pass by.
  constexpr int64_t kBlock = 8;
  const int64_t num_columns = weight.size(0), num_blocks = (num_columns + kBlock - 1) / kBlock;
  parallel_for(num_blocks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock;
      GRPO_MC_KERNEL(row_linear_columns)(p, first, std::min(first + kBlock, num_columns));
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(grpo_mc, CPU, m) { m.impl("row_linear", row_linear); }

}  // namespace grpo_mc
