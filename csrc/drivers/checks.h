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
