// The CUDA library: opened by path, checked, and remembered.
#include "drivers/device.h"

#include <dlfcn.h>

#include <atomic>
#include <string>

#if defined(GRPO_MC_WITH_CUDA)
#include <c10/cuda/CUDAStream.h>
#endif

namespace grpo_mc {
namespace {

std::atomic<const CudaKernels*> loaded{nullptr};
std::atomic<bool> is_emulated{false};

// Opens the library at `path` for the rest of the process. `emulated`: its kernels take CPU memory, and every call goes
// to them until a library is loaded with an empty path.
void load_cuda(const std::string& path, bool emulated) {
  if (path.empty()) {
    is_emulated = false;
    loaded = nullptr;
    return;
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, "grpo_mc.ops: ", path, " does not load: ", dlerror());
  const auto table = reinterpret_cast<const CudaKernels* (*)()>(dlsym(library, "grpo_mc_cuda_kernels"));
  TORCH_CHECK(table != nullptr, "grpo_mc.ops: ", path, " is no CUDA library of this package");
  const CudaKernels* kernels = table();
  TORCH_CHECK(kernels->interface == kCudaInterface && kernels->size == sizeof(CudaKernels), "grpo_mc.ops: ", path,
              " is from another build of the operators; build it again");
  loaded = kernels;
  is_emulated = emulated;
}

TORCH_LIBRARY_IMPL(grpo_mc, CompositeExplicitAutograd, m) { m.impl("load_cuda", load_cuda); }

}  // namespace

bool runs_on_cuda(const at::Tensor& x) { return x.is_cuda() || is_emulated; }

const CudaKernels& cuda_kernels(const char* op) {
  const CudaKernels* kernels = loaded;
  TORCH_CHECK_NOT_IMPLEMENTED(kernels != nullptr, op,
                              ": got CUDA tensors, but the CUDA operators are not built; build them where nvcc is found: "
                              "GRPO_MC_CUDA=1 pip install --no-build-isolation -e .");
  return *kernels;
}

void* current_stream([[maybe_unused]] const at::Device& device) {
#if defined(GRPO_MC_WITH_CUDA)
  if (device.is_cuda()) return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#endif
  return nullptr;
}

}  // namespace grpo_mc
