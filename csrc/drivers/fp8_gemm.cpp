// fp8_gemm and fp8_grouped_gemm on the CPU: checks, packing of a, and one kernel call per group of columns.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "common/fp8.h"
#include "drivers/checks.h"
#include "cpu/kernels.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

constexpr int64_t kChunkRows = 510;  // rows packed at once: 85 panels, 4 bytes * 510 * 128 of each block stay in the cache

const uint8_t* codes_of(const Tensor& x) { return static_cast<const uint8_t*>(x.const_data_ptr()); }

void check_codes(const char* op, const char* name, const Tensor& x, int64_t dims) {
  TORCH_CHECK_VALUE(x.dim() == dims, op, ": ", name, " has shape ", x.sizes(), "; it must have ", dims, " dimensions");
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat8_e4m3fn, op, ": ", name, " has dtype ", x.scalar_type(), "; it must be Float8_e4m3fn");
}

void check_scale(const char* op, const char* name, const Tensor& scale, at::IntArrayRef shape, at::IntArrayRef other) {
  TORCH_CHECK_VALUE(scale.scalar_type() == at::kFloat, op, ": ", name, " has dtype ", scale.scalar_type(), "; it must be Float");
  TORCH_CHECK_VALUE(scale.sizes() == shape || scale.sizes() == other, op, ": ", name, " has shape ", scale.sizes(), "; it must be ", shape,
                    shape == other ? "" : " or, in tiles of 1 x 128, ", shape == other ? "" : c10::str(other));
}

// One product whose pointers, sizes and strides are set.
void multiply(Fp8Gemm p) {
  const int64_t depth_blocks = fp8_blocks(p.depth), groups = (p.columns + kFp8GroupColumns - 1) / kFp8GroupColumns;
  if (p.rows == 0 || p.columns == 0) return;
  if (p.rows <= kFp8FewRows) {
    const int64_t width = depth_blocks * kFp8Block;
    std::vector<float> rows(static_cast<size_t>(p.rows * width));
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t k = 0; k < p.depth; ++k) rows[static_cast<size_t>(r * width + k)] = e4m3_to_float(p.a[r * p.a_stride + k]);
    parallel_for(groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) GRPO_MC_KERNEL(fp8_few_rows_group)(p, rows.data(), group);
    });
    return;
  }
  const int64_t out_bytes = p.dtype == Element::kFloat ? 4 : 2, all_rows = p.rows;
  const int64_t most_panels = (std::min(kChunkRows, all_rows) + kFp8PanelRows - 1) / kFp8PanelRows;
  std::vector<float> packed(static_cast<size_t>(depth_blocks * most_panels * kFp8Block * kFp8PanelRows));
  for (int64_t first = 0; first < all_rows; first += kChunkRows) {
    Fp8Gemm part = p;
    part.rows = std::min(kChunkRows, all_rows - first);
    part.a += first * p.a_stride;
    part.a_scale += first * depth_blocks;
    part.out = static_cast<char*>(p.out) + first * p.out_stride * out_bytes;
    const int64_t panels = (part.rows + kFp8PanelRows - 1) / kFp8PanelRows;
    parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) GRPO_MC_KERNEL(fp8_pack_panel)(part, panel, panels, packed.data());
    });
    parallel_for(groups, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(static_cast<size_t>(kFp8GroupColumns * (kFp8Block + panels * kFp8PanelRows)));
      for (int64_t group = begin; group < end; ++group) GRPO_MC_KERNEL(fp8_gemm_group)(part, packed.data(), group, scratch.data());
    });
  }
}

void check_accumulator(const char* op, const Tensor& out, at::IntArrayRef shape, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(out.sizes() == shape && out.scalar_type() == dtype, op, ": accumulate_into is ", out.scalar_type(), " ", out.sizes(),
                    "; it must be ", dtype, " ", shape);
  TORCH_CHECK_VALUE(out.stride(-1) == 1 || out.size(-1) <= 1, op, ": accumulate_into has strides ", out.strides(),
                    "; its columns must be adjacent");
}

// Two operands with what the kernels need of them; holds the contiguous copies that strided ones are given.
struct Operands {
  Tensor a, a_scale, b, b_scale;

  Fp8Gemm problem(const Tensor& out, int64_t rows, bool accumulate) const {
    Fp8Gemm p{};
    p.a = codes_of(a);
    p.b = codes_of(b);
    p.a_scale = a_scale.const_data_ptr<float>();
    p.b_scale = b_scale.const_data_ptr<float>();
    p.out = out.mutable_data_ptr();
    p.rows = rows;
    p.columns = b.size(-2);
    p.depth = a.size(1);
    p.a_stride = a.stride(0);
    p.b_stride = b.stride(-2);
    p.out_stride = out.stride(0);
    p.b_scale_rows = b_scale.size(-2) == b.size(-2) ? 1 : kFp8Block;
    p.dtype = out.scalar_type() == at::kFloat ? Element::kFloat : Element::kBFloat16;
    p.accumulate = accumulate;
    return p;
  }
};

// Checks what fp8_gemm and fp8_grouped_gemm have in common; b has `b_dims` dimensions.
Operands check_operands(const char* op, const Tensor& out, const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale, int64_t b_dims) {
  check_codes(op, "a", a, 2);
  check_codes(op, "b", b, b_dims);
  TORCH_CHECK_VALUE(a.size(1) == b.size(-1), op, ": a is ", a.sizes(), " and b ", b.sizes(), "; they must be [M, K] and [",
                    b_dims == 3 ? "E, " : "", "N, K]");
  const int64_t columns = b.size(-2), depth_blocks = fp8_blocks(a.size(1));
  check_scale(op, "a_scale", a_scale, {a.size(0), depth_blocks}, {a.size(0), depth_blocks});
  std::vector<int64_t> wide = {fp8_blocks(columns), depth_blocks}, narrow = {columns, depth_blocks};
  if (b_dims == 3) {
    wide.insert(wide.begin(), b.size(0));
    narrow.insert(narrow.begin(), b.size(0));
  }
  check_scale(op, "b_scale", b_scale, wide, narrow);
  TORCH_CHECK_VALUE(out.scalar_type() == at::kFloat || out.scalar_type() == at::kBFloat16, op, ": out_dtype is ", out.scalar_type(),
                    "; it must be Float or BFloat16");
  check_accumulator(op, out, {a.size(0), columns}, out.scalar_type());
  check_no_overlap(op, "accumulate_into", out, {a, a_scale, b, b_scale});
  return {with_adjacent_columns(a), a_scale.contiguous(), with_adjacent_columns(b), b_scale.contiguous()};
}

void fp8_gemm_(Tensor& out, const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale, bool accumulate) {
  multiply(check_operands("fp8_gemm", out, a, a_scale, b, b_scale, 2).problem(out, a.size(0), accumulate));
}

void fp8_grouped_gemm_(Tensor& out, const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale, const Tensor& offsets, bool accumulate) {
  const char* op = "fp8_grouped_gemm";
  const Operands operands = check_operands(op, out, a, a_scale, b, b_scale, 3);
  const int64_t experts = b.size(0), rows = a.size(0);
  check_vector(op, "offsets", offsets, experts + 1, at::kLong);
  const Tensor bounds = offsets.contiguous();
  const int64_t* bound = bounds.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(bound[0] >= 0 && bound[experts] <= rows, op, ": offsets go from ", bound[0], " to ", bound[experts], "; a has rows 0 to ",
                    rows);
  for (int64_t e = 0; e < experts; ++e)
    TORCH_CHECK_VALUE(bound[e] <= bound[e + 1], op, ": offsets[", e, "] is ", bound[e], " and offsets[", e + 1, "] is ", bound[e + 1],
                      "; they must not fall");
  if (!accumulate) {  // rows of no expert
    out.narrow(0, 0, bound[0]).zero_();
    out.narrow(0, bound[experts], rows - bound[experts]).zero_();
  }
  const Fp8Gemm all = operands.problem(out, rows, accumulate);
  const int64_t depth_blocks = fp8_blocks(all.depth), out_bytes = all.dtype == Element::kFloat ? 4 : 2;
  for (int64_t e = 0; e < experts; ++e) {
    Fp8Gemm part = all;
    part.rows = bound[e + 1] - bound[e];
    part.a += bound[e] * all.a_stride;
    part.a_scale += bound[e] * depth_blocks;
    part.b += e * operands.b.stride(0);
    part.b_scale += e * operands.b_scale.stride(0);
    part.out = static_cast<char*>(all.out) + bound[e] * all.out_stride * out_bytes;
    multiply(part);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(grpo_mc, CPU, m) {
  m.impl("fp8_gemm_", fp8_gemm_);
  m.impl("fp8_grouped_gemm_", fp8_grouped_gemm_);
}

}  // namespace grpo_mc
