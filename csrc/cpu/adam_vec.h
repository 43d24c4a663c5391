// adam_update of common/adam.h for eight entries at a time, bit for bit.
#pragma once

#include <cmath>

#include "common/adam.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {

GRPO_MC_INLINE F8 sqrt8(F8 x) {
#if defined(__AVX2__)
  return (F8)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

GRPO_MC_INLINE void update8(const AdamFactors& f, F8 grad, F8& param, F8& m, F8& v) {
  const F8 g = grad * splat(f.grad);
  m = m + splat(f.rest1) * (g - m);
  v = v * splat(f.beta2) + splat(f.rest2) * g * g;
  param = param * splat(f.decay) - splat(f.step_size) * (m / (sqrt8(v) * splat(f.root) + splat(f.eps)));
}

}  // namespace grpo_mc::GRPO_MC_ISA
