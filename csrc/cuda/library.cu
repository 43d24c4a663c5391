// nvcc: sm_80 sm_90 sm_100
// The table of launchers.
#include "cuda/library.h"

#include "cuda/launchers.h"

const grpo_mc::CudaKernels* grpo_mc_cuda_kernels() {
  static const grpo_mc::CudaKernels kernels{
      .interface = grpo_mc::kCudaInterface,
      .size = sizeof(grpo_mc::CudaKernels),
      .quantize_fp8 = grpo_mc::cuda::quantize_fp8,
      .dequantize_fp8 = grpo_mc::cuda::dequantize_fp8,
      .quantize_codes = grpo_mc::cuda::quantize_codes,
      .dequantize_codes = grpo_mc::cuda::dequantize_codes,
      .moe_plan = grpo_mc::cuda::moe_plan,
      .moe_permute = grpo_mc::cuda::moe_permute,
      .moe_unpermute = grpo_mc::cuda::moe_unpermute,
      .moe_unpermute_backward = grpo_mc::cuda::moe_unpermute_backward,
      .rms_norm = grpo_mc::cuda::rms_norm,
      .token_logprobs = grpo_mc::cuda::token_logprobs,
      .token_logprobs_backward = grpo_mc::cuda::token_logprobs_backward,
      .policy_loss = grpo_mc::cuda::policy_loss,
      .adam_step = grpo_mc::cuda::adam_step,
      .group_advantages = grpo_mc::cuda::group_advantages,
      .row_linear = grpo_mc::cuda::row_linear,
      .paged_attention = grpo_mc::cuda::paged_attention,
      .fp8_products = grpo_mc::cuda::fp8_products,
      .fp8_workspace = grpo_mc::cuda::fp8_workspace,
  };
  return &kernels;
}
