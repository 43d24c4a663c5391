// Argument checks shared by the drivers. A message says operation, what was got, and what is needed.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <cmath>
#include <initializer_list>

#include "cpu/kernels.h"

namespace grpo_mc {

inline void check_vector(const char* op, const char* name, const at::Tensor& x, int64_t size, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(x.dim() == 1 && x.size(0) == size, op, ": ", name, " has shape ", x.sizes(), "; it must be [", size, "]");
  TORCH_CHECK_VALUE(x.scalar_type() == dtype, op, ": ", name, " has dtype ", x.scalar_type(), "; it must be ", dtype);
}

// Bounds of the rows of each expert, [E + 1]; `experts` < 0 = any number of them. Returns them adjacent in memory.
inline at::Tensor check_offsets(const char* op, const at::Tensor& offsets, int64_t experts, int64_t rows) {
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.size(0) > 0, op, ": offsets has shape ", offsets.sizes(), "; it must be [E + 1]");
  check_vector(op, "offsets", offsets, experts < 0 ? offsets.size(0) : experts + 1, at::kLong);
  const at::Tensor bounds = offsets.contiguous();
  if (bounds.is_cuda()) return bounds;  // a look at them would wait for the device: kernels bear any
  const int64_t *bound = bounds.const_data_ptr<int64_t>(), last = offsets.size(0) - 1;
  TORCH_CHECK_VALUE(bound[0] >= 0 && bound[last] <= rows, op, ": offsets go from ", bound[0], " to ", bound[last], "; there are rows 0 to ", rows);
  for (int64_t e = 0; e < last; ++e)
    TORCH_CHECK_VALUE(bound[e] <= bound[e + 1], op, ": offsets[", e, "] is ", bound[e], " and offsets[", e + 1, "] is ", bound[e + 1],
                      "; they must not fall");
  return bounds;
}

// The tensor, or a copy of it whose columns are adjacent in memory.
inline at::Tensor with_adjacent_columns(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

// What is written may share no memory with itself or with what is read.
inline void check_no_overlap(const char* op, const char* name, const at::Tensor& written, std::initializer_list<at::Tensor> read) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(written) != at::MemOverlap::Yes, op, ": ", name, " has strides ", written.strides(),
                    "; its entries must lie apart");
  for (const at::Tensor& x : read)
    TORCH_CHECK_VALUE(!x.defined() || !written.is_alias_of(x) || at::get_overlap_status(written, x) == at::MemOverlapStatus::No, op, ": ", name,
                      " shares memory with an input; give it memory of its own");
}

inline void check_finite(const char* op, const char* name, double value) {
  TORCH_CHECK_VALUE(std::isfinite(value), op, ": ", name, " is ", value, "; it must be a finite number");
}

inline Element element_of(const char* op, const char* name, const at::Tensor& x, bool allow_double) {
  if (x.scalar_type() == at::kFloat) return Element::kFloat;
  if (x.scalar_type() == at::kBFloat16) return Element::kBFloat16;
  TORCH_CHECK_VALUE(allow_double && x.scalar_type() == at::kDouble, op, ": ", name, " has dtype ", x.scalar_type(),
                    "; the operator takes Float", allow_double ? ", BFloat16 or Double" : " or BFloat16");
  return Element::kDouble;
}

}  // namespace grpo_mc
