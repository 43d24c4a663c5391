// Root-mean-square norm of one row: one pass for the sum of squares, one that scales.
#include <cmath>

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {

void rms_norm_row(const float* x, const float* weight, float* out, int64_t width, double eps) {
  F8 sums[4] = {};  // of four vectors in turn, so that additions do not wait for each other
  int64_t k = 0;
  for (; k + 4 * kLanes <= width; k += 4 * kLanes)
    for (int i = 0; i < 4; ++i) {
      const F8 part = load8(x + k + i * kLanes);
      sums[i] = fma8(part, part, sums[i]);
    }
  for (; k < width; k += kLanes) {
    const F8 part = k + kLanes <= width ? load8(x + k) : load_tail(x + k, width - k, 0.0f);
    sums[0] = fma8(part, part, sums[0]);
  }
  const double mean = sum8((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<double>(width);
  const F8 scale = splat(static_cast<float>(1.0 / std::sqrt(mean + eps)));
  for (k = 0; k + kLanes <= width; k += kLanes) store8(out + k, load8(x + k) * scale * load8(weight + k));
  if (k < width) {
    const int64_t left = width - k;
    store_tail(out + k, left, load_tail(x + k, left, 0.0f) * scale * load_tail(weight + k, left, 0.0f));
  }
}

}  // namespace grpo_mc::GRPO_MC_ISA
