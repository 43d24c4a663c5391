// quantize_int4, quantize_int8 and back: checks, and on the CPU one kernel call per block.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "common/block_codes.h"
#include "cpu/kernels.h"
#include "drivers/checks.h"
#include "drivers/device.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

constexpr int64_t kGrainEntries = 32768;

void check_block(const char* op, int64_t block) {
  TORCH_CHECK_VALUE(block >= kHadamardSize && block % kHadamardSize == 0 && block <= kCodesMaxBlock, op, ": block is ", block,
                    "; it must be a multiple of 32 up to ", kCodesMaxBlock);
}

void check_contiguous(const char* op, const char* name, const Tensor& x) {
  TORCH_CHECK_VALUE(x.is_contiguous(), op, ": ", name, " has strides ", x.strides(), "; it is written in place and must be contiguous");
}

template <int kBits>
std::tuple<Tensor, Tensor> quantize(const Tensor& x, const std::optional<Tensor>& error_codes, const std::optional<Tensor>& error_scale,
                                    int64_t block, bool stochastic, bool hadamard, int64_t seed, int64_t offset) {
  const char* op = kBits == 4 ? "quantize_int4" : "quantize_int8";
  check_block(op, block);
  TORCH_CHECK_VALUE(offset >= 0, op, ": offset is ", offset, "; it must be at least 0");
  TORCH_CHECK_VALUE(error_codes.has_value() == error_scale.has_value(), op, ": give both error codes and error scales, or neither");
  const Tensor wide = (x.scalar_type() == at::kHalf ? x.to(at::kFloat) : x).contiguous();
  const int64_t blocks = (x.numel() + block - 1) / block;
  const auto code_options = x.options().dtype(kBits == 4 ? at::kByte : at::kChar);
  Tensor codes = at::empty({blocks, block * kBits / 8}, code_options.memory_format(at::MemoryFormat::Contiguous));
  Tensor scales = at::empty({blocks}, x.options().dtype(at::kFloat).memory_format(at::MemoryFormat::Contiguous));
  CodeQuantize p{};
  p.bits = kBits;
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
  p.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  p.scales = scales.mutable_data_ptr<float>();
  p.n = x.numel();
  p.block = block;
  p.seed = static_cast<uint64_t>(seed);
  p.offset = static_cast<uint64_t>(offset);
  p.stochastic = stochastic;
  p.hadamard = hadamard;
  if (blocks == 0) return {codes, scales};
  if (runs_on_cuda(x)) {
    launch(op, &CudaKernels::quantize_codes, p, x);
    return {codes, scales};
  }
  parallel_for(blocks, std::max<int64_t>(1, kGrainEntries / block), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) GRPO_MC_KERNEL(quantize_code_block)(p, i);
  });
  return {codes, scales};
}

template <int kBits>
void dequantize_(Tensor& out, const Tensor& codes, const Tensor& scales, int64_t block, bool hadamard, bool add) {
  const char* op = kBits == 4 ? "dequantize_int4" : "dequantize_int8";
  check_block(op, block);
  const int64_t blocks = (out.numel() + block - 1) / block;
  const at::ScalarType code_type = kBits == 4 ? at::kByte : at::kChar;
  TORCH_CHECK_VALUE(codes.scalar_type() == code_type && codes.numel() == blocks * block * kBits / 8, op, ": codes are ", codes.scalar_type(), " ",
                    codes.sizes(), "; for ", out.numel(), " entries they must be ", code_type, " [", blocks, ", ", block * kBits / 8, "]");
  TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat && scales.numel() == blocks, op, ": scale is ", scales.scalar_type(), " ",
                    scales.sizes(), "; it must be Float [", blocks, "]");
  check_contiguous(op, "out", out);
  check_no_overlap(op, "out", out, {codes, scales});
  const Tensor from = codes.contiguous(), factors = scales.contiguous();
  CodeDequantize p{};
  p.bits = kBits;
  p.dtype = element_of(op, "out", out, false);
  p.codes = static_cast<const uint8_t*>(from.const_data_ptr());
  p.scales = factors.const_data_ptr<float>();
  p.out = out.mutable_data_ptr();
  p.n = out.numel();
  p.block = block;
  p.hadamard = hadamard;
  p.add = add;
  if (blocks == 0) return;
  if (runs_on_cuda(out)) return launch(op, &CudaKernels::dequantize_codes, p, out);
  parallel_for(blocks, std::max<int64_t>(1, kGrainEntries / block), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) GRPO_MC_KERNEL(dequantize_code_block)(p, i);
  });
}

}  // namespace

GRPO_MC_OPERATORS(m) {
  m.impl("quantize_int4", quantize<4>);
  m.impl("quantize_int8", quantize<8>);
  m.impl("dequantize_int4_", dequantize_<4>);
  m.impl("dequantize_int8_", dequantize_<8>);
}

}  // namespace grpo_mc
