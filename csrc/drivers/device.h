// Where a call runs: its tensors' device decides between the kernels of csrc/cpu/ and the launchers of the CUDA library.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "cuda/library.h"

namespace grpo_mc {

// True for CUDA tensors, and for all tensors while an emulated library is loaded (tests run its kernels on the CPU).
bool runs_on_cuda(const at::Tensor& x);

// The launchers; raises when the CUDA library is not loaded or lacks them.
const CudaKernels& cuda_kernels(const char* op);

// The stream that torch queues this device's work on: a cudaStream_t, nullptr for the default one.
void* current_stream(const at::Device& device);

// Runs a launcher of the table on x's device, behind what torch has queued there.
template <typename Arguments>
void launch(const char* op, Launcher<Arguments> CudaKernels::* launcher, const Arguments& arguments, const at::Tensor& x) {
  const Launcher<Arguments> run = cuda_kernels(op).*launcher;
  TORCH_CHECK_NOT_IMPLEMENTED(run != nullptr, op, ": has no CUDA kernel in this version; call it with CPU tensors");
  const c10::OptionalDeviceGuard guard(x.is_cuda() ? std::optional<at::Device>(x.device()) : std::nullopt);
  const char* problem = run(arguments, current_stream(x.device()));
  TORCH_CHECK(problem == nullptr, op, ": the CUDA kernel could not be launched: ", problem);
}

}  // namespace grpo_mc

// One driver for both devices: GRPO_MC_OPERATORS(m) { m.impl("name", function); }
#define GRPO_MC_OPERATORS(m)                                         \
  static void register_operators(torch::Library& m);                 \
  TORCH_LIBRARY_IMPL(grpo_mc, CPU, cpu) { register_operators(cpu); } \
  TORCH_LIBRARY_IMPL(grpo_mc, CUDA, cuda) { register_operators(cuda); } \
  static void register_operators(torch::Library& m)
