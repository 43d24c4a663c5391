// nvcc: sm_80 sm_90 sm_100
// Root-mean-square norm: one block a row, one pass for the sum of squares, one that scales.
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) rms_norm_rows(RmsNorm p) {
  __shared__ double scratch[kWarp];
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const float* x = p.x + row * p.width;
    float* out = p.out + row * p.width;
    float squares = 0.0f;
    for (int64_t k = threadIdx.x; k < p.width; k += kThreads) squares = fmaf(x[k], x[k], squares);
    const double mean = block_sum(static_cast<double>(squares), scratch) / static_cast<double>(p.width);
    const float scale = static_cast<float>(1.0 / sqrt(mean + p.eps));
    for (int64_t k = threadIdx.x; k < p.width; k += kThreads) out[k] = x[k] * scale * p.weight[k];
  }
}

}  // namespace

const char* rms_norm(const RmsNorm& p, void* stream) { return launch(rms_norm_rows, blocks_for(p.rows), kThreads, 0, stream, p); }

}  // namespace grpo_mc::cuda
