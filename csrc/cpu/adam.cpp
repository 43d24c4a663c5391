// Adam steps; the arithmetic is common/adam.h's, eight entries at a time.
#include "common/adam.h"

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

GRPO_MC_INLINE F8 sqrt8(F8 x) {
#if defined(__AVX2__)
  return (F8)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// adam_update, bit for bit.
GRPO_MC_INLINE void update8(const AdamFactors& f, F8 grad, F8& param, F8& m, F8& v) {
  const F8 g = grad * splat(f.grad);
  m = m + splat(f.rest1) * (g - m);
  v = v * splat(f.beta2) + splat(f.rest2) * g * g;
  param = param * splat(f.decay) - splat(f.step_size) * (m / (sqrt8(v) * splat(f.root) + splat(f.eps)));
}

GRPO_MC_INLINE float load1(const float* p) { return *p; }
GRPO_MC_INLINE float load1(const uint16_t* p) { return bf16_to_float(*p); }

template <typename T>
GRPO_MC_INLINE void step_range(const AdamStep& p, int64_t begin, int64_t end) {
  const T* grads = static_cast<const T*>(p.grads);
  float *params = p.params, *exp_avg = p.exp_avg, *exp_avg_sq = p.exp_avg_sq;
  const AdamFactors f = p.factors;
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    F8 param = load8(params + i), m = load8(exp_avg + i), v = load8(exp_avg_sq + i);
    update8(f, load8(grads + i), param, m, v);
    store8(params + i, param);
    store8(exp_avg + i, m);
    store8(exp_avg_sq + i, v);
    if (p.out != nullptr) store8(p.out + i, param);
  }
  for (; i < end; ++i) {
    adam_update(f, load1(grads + i), params[i], exp_avg[i], exp_avg_sq[i]);
    if (p.out != nullptr) p.out[i] = float_to_bf16(params[i]);
  }
}

}  // namespace

void adam_step_range(const AdamStep& p, int64_t begin, int64_t end) {
  if (p.dtype == Element::kFloat) step_range<float>(p, begin, end);
  else step_range<uint16_t>(p, begin, end);
}

}  // namespace grpo_mc::GRPO_MC_ISA
