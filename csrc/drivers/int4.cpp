// quantize_int4 and dequantize_int4 on the CPU: checks, and one kernel call per block.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "drivers/checks.h"
#include "cpu/kernels.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

constexpr int64_t kGrainEntries = 32768;

void check_block(const char* op, int64_t block) {
  TORCH_CHECK_VALUE(block >= kHadamardSize && block % kHadamardSize == 0 && block <= kInt4MaxBlock, op, ": block is ", block,
                    "; it must be a multiple of 32 up to ", kInt4MaxBlock);
}

void check_contiguous(const char* op, const char* name, const Tensor& x) {
  TORCH_CHECK_VALUE(x.is_contiguous(), op, ": ", name, " has strides ", x.strides(), "; it is written in place and must be contiguous");
}

std::tuple<Tensor, Tensor> quantize_int4(const Tensor& x, const std::optional<Tensor>& error_codes, const std::optional<Tensor>& error_scale,
                                         int64_t block, bool stochastic, bool hadamard, int64_t seed, int64_t offset) {
  const char* op = "quantize_int4";
  check_block(op, block);
  TORCH_CHECK_VALUE(offset >= 0, op, ": offset is ", offset, "; it must be at least 0");
  TORCH_CHECK_VALUE(error_codes.has_value() == error_scale.has_value(), op, ": give both error codes and error scales, or neither");
  const Tensor wide = (x.scalar_type() == at::kHalf ? x.to(at::kFloat) : x).contiguous();
  const int64_t blocks = (x.numel() + block - 1) / block;
  Tensor codes = at::empty({blocks, block / 2}, x.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
  Tensor scales = at::empty({blocks}, x.options().dtype(at::kFloat).memory_format(at::MemoryFormat::Contiguous));
  Int4Quantize p{};
  p.dtype = element_of(op, "x", wide, false);
  if (error_codes) {
    TORCH_CHECK_VALUE(error_codes->scalar_type() == at::kChar && error_codes->numel() == blocks * block, op, ": error codes are ",
                      error_codes->scalar_type(), " ", error_codes->sizes(), "; for x ", x.sizes(), " they must be Char [", blocks, ", ", block, "]");
    TORCH_CHECK_VALUE(error_scale->scalar_type() == at::kFloat && error_scale->numel() == blocks, op, ": error scales are ",
                      error_scale->scalar_type(), " ", error_scale->sizes(), "; they must be Float [", blocks, "]");
    check_contiguous(op, "error codes", *error_codes);
    check_contiguous(op, "error scales", *error_scale);
    p.error_codes = error_codes->mutable_data_ptr<int8_t>();
    p.error_scales = error_scale->mutable_data_ptr<float>();
  }
  p.x = wide.const_data_ptr();
  p.codes = codes.mutable_data_ptr<uint8_t>();
  p.scales = scales.mutable_data_ptr<float>();
  p.n = x.numel();
  p.block = block;
  p.seed = static_cast<uint64_t>(seed);
  p.offset = static_cast<uint64_t>(offset);
  p.stochastic = stochastic;
  p.hadamard = hadamard;
  parallel_for(blocks, std::max<int64_t>(1, kGrainEntries / block), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) GRPO_MC_KERNEL(int4_quantize_block)(p, i);
  });
  return {codes, scales};
}

void dequantize_int4_(Tensor& out, const Tensor& codes, const Tensor& scales, int64_t block, bool hadamard, bool add) {
  const char* op = "dequantize_int4";
  check_block(op, block);
  const int64_t blocks = (out.numel() + block - 1) / block;
  TORCH_CHECK_VALUE(codes.scalar_type() == at::kByte && codes.numel() == blocks * block / 2, op, ": codes are ", codes.scalar_type(), " ",
                    codes.sizes(), "; for ", out.numel(), " entries they must be Byte [", blocks, ", ", block / 2, "]");
  TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat && scales.numel() == blocks, op, ": scale is ", scales.scalar_type(), " ",
                    scales.sizes(), "; it must be Float [", blocks, "]");
  check_contiguous(op, "out", out);
  check_no_overlap(op, "out", out, {codes, scales});
  const Tensor from = codes.contiguous(), factors = scales.contiguous();
  Int4Dequantize p{};
  p.dtype = element_of(op, "out", out, false);
  p.codes = from.const_data_ptr<uint8_t>();
  p.scales = factors.const_data_ptr<float>();
  p.out = out.mutable_data_ptr();
  p.n = out.numel();
  p.block = block;
  p.hadamard = hadamard;
  p.add = add;
  parallel_for(blocks, std::max<int64_t>(1, kGrainEntries / block), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) GRPO_MC_KERNEL(int4_dequantize_block)(p, i);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(grpo_mc, CPU, m) {
  m.impl("quantize_int4", quantize_int4);
  m.impl("dequantize_int4_", dequantize_int4_);
}

}  // namespace grpo_mc
