// The interface of the CUDA library: one table of launchers, found by one C symbol. Drivers fill in the structs of
// common/arguments.h with device pointers and call a launcher; the library knows no torch and is built by nvcc alone.
#pragma once

#include "common/arguments.h"

namespace grpo_mc {

// Queues the work on the stream (a cudaStream_t) and returns; nullptr, or a sentence about what went wrong.
template <typename Arguments>
using Launcher = const char* (*)(const Arguments& arguments, void* stream);

// Raised whenever a struct of arguments or the table changes: a library of another build is refused.
constexpr int64_t kCudaInterface = 2;

struct CudaKernels {
  int64_t interface;
  int64_t size;  // of this table, in bytes
  Launcher<Fp8QuantizeTiles> quantize_fp8;
  Launcher<Fp8DequantizeTiles> dequantize_fp8;
  Launcher<CodeQuantize> quantize_codes;
  Launcher<CodeDequantize> dequantize_codes;
  Launcher<MoePlan> moe_plan;
  Launcher<MoePermute> moe_permute;
  Launcher<MoeUnpermute> moe_unpermute;
  Launcher<MoeUnpermuteBackward> moe_unpermute_backward;
  Launcher<RmsNorm> rms_norm;
  Launcher<TokenStats> token_logprobs;
  Launcher<TokenGrads> token_logprobs_backward;
  Launcher<PolicyCall> policy_loss;
  Launcher<AdamStep> adam_step;
  Launcher<GroupAdvantages> group_advantages;
  Launcher<RowLinear> row_linear;
  Launcher<PagedCall> paged_attention;
  Launcher<Fp8Products> fp8_products;
  int64_t (*fp8_workspace)(const Fp8Products& arguments);  // bytes, on the current device
};

}  // namespace grpo_mc

extern "C" {
// Visible although everything else is hidden: what the loader looks up.
__attribute__((visibility("default"))) const grpo_mc::CudaKernels* grpo_mc_cuda_kernels();
}
