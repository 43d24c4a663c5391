// Operands for wide boxes: which can be read as they lie, and where the copies of the others are.
#pragma once

#include "common/arguments.h"
#include "common/fp8.h"
#include "cuda/launch.h"

namespace grpo_mc::cuda {

// Codes [planes, rows, width], whose entries are adjacent along the depth and whose strides are multiples of 16 bytes.
// A plane is an expert's b, or everything.
struct BoxedOperand {
  const uint8_t* codes;
  int64_t width, stride, planes, plane_stride;
};

// Copies begin every block of the depth at a multiple of 128 bytes; with along_depth at the place of its scales.
inline int64_t packed_width(const Fp8Products& g) {
  const int64_t depth = g.product.depth;
  return kFp8Block * (g.along_depth ? fp8_expert_tiles(depth, g.first_expert + g.experts) : fp8_blocks(depth));
}

inline bool needs_copy(const Fp8Products& g, const Fp8Operand& x, int64_t planes, int64_t plane_stride) {
  const auto fits = [](int64_t stride) { return stride > 0 && stride % 16 == 0 && stride < int64_t{1} << 40; };
  return g.along_depth || x.by_depth || !fits(x.stride) || (planes > 1 && !fits(plane_stride)) || reinterpret_cast<uintptr_t>(x.codes) % 16 != 0;
}

inline BoxedOperand boxed(const Fp8Products& g, const Fp8Operand& x, int64_t rows, int64_t planes, int64_t plane_stride, const uint8_t* copy) {
  const int64_t width = packed_width(g);
  if (needs_copy(g, x, planes, plane_stride)) return {copy, width, width, planes, width * rows};
  return {x.codes, g.product.depth, x.stride, planes, planes > 1 ? plane_stride : x.stride * rows};
}

inline int64_t planes_of_b(const Fp8Products& g) { return g.along_depth || g.offsets == nullptr ? 1 : g.experts; }

inline int64_t bytes_of_copy(const Fp8Products& g, const Fp8Operand& x, int64_t rows, int64_t planes, int64_t plane_stride) {
  return needs_copy(g, x, planes, plane_stride) ? planes * rows * packed_width(g) : 0;  // a multiple of 128
}

inline int64_t bytes_of_a(const Fp8Products& g) { return bytes_of_copy(g, g.product.a, g.product.rows, 1, 0); }
inline int64_t bytes_of_b(const Fp8Products& g) { return bytes_of_copy(g, g.product.b, g.product.columns, planes_of_b(g), g.b_stride); }

inline BoxedOperand boxed_a(const Fp8Products& g) { return boxed(g, g.product.a, g.product.rows, 1, 0, g.workspace); }
inline BoxedOperand boxed_b(const Fp8Products& g) {
  return boxed(g, g.product.b, g.product.columns, planes_of_b(g), g.b_stride, g.workspace + bytes_of_a(g));
}

// Makes the copies, in g.workspace: bytes_of_a, then bytes_of_b.
const char* fp8_pack(const Fp8Products& g, void* stream);

// All products by wide boxes; only where fp8_runs_on_hopper, and with a workspace of bytes_of_a + bytes_of_b.
const char* fp8_on_hopper(const Fp8Products& g, void* stream);

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess;
  return known ? value : 0;
}

inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Compute capability 9.0, and sizes whose coordinates are 32-bit numbers.
inline bool fp8_runs_on_hopper(const Fp8Products& g) {
  const Fp8Gemm& p = g.product;
  const auto small = [](int64_t size) { return size < int64_t{1} << 31; };
  return p.depth > 0 && !p.a.square && small(p.rows) && small(p.columns) && small(packed_width(g)) &&
         device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 && device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

}  // namespace grpo_mc::cuda
