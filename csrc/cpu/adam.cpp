// Adam steps with float states, eight entries at a time.
#include "cpu/adam_vec.h"
#include "cpu/kernels.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

GRPO_MC_INLINE float load1(const float* p) { return *p; }
GRPO_MC_INLINE float load1(const uint16_t* p) { return bf16_to_float(*p); }

template <typename T>
GRPO_MC_INLINE void step_range(const AdamStep& p, int64_t begin, int64_t end) {
  const T* grads = static_cast<const T*>(p.grads);
  float *params = p.params, *exp_avg = static_cast<float*>(p.exp_avg), *exp_avg_sq = static_cast<float*>(p.exp_avg_sq);
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
