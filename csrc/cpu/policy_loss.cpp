// Token kernel of policy_loss: the loss of each token, its derivative and the metric sums, in one pass over eight float
// lanes, or one double (gradcheck). The arithmetic is in common/policy_loss.h.
#include <cmath>

#include "common/policy_loss.h"
#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

struct FloatLanes {
  using Scalar = float;
  using V = F8;
  using Mask = I8;
  static constexpr int64_t kWidth = kLanes;
  static GRPO_MC_INLINE V set(double x) { return splat(static_cast<float>(x)); }
  static GRPO_MC_INLINE V load(const float* p, int64_t n) { return n >= kLanes ? load8(p) : load_tail(p, n, 0.0f); }
  static GRPO_MC_INLINE void store(float* p, int64_t n, V x) {
    if (n >= kLanes) store8(p, x);
    else store_tail(p, n, x);
  }
  static GRPO_MC_INLINE Mask load_mask(const uint8_t* p, int64_t n) {
    I8 mask = {0, 0, 0, 0, 0, 0, 0, 0};
    if (n >= kLanes) {
#if defined(__AVX2__)
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
      return (I8)_mm256_cvtepu8_epi32(bytes) != 0;
#endif
    }
    for (int64_t i = 0; i < n && i < kLanes; ++i) mask[i] = p[i] != 0 ? -1 : 0;
    return mask;
  }
  static GRPO_MC_INLINE V exp(V x) { return exp8(x); }
  // exp(d) - 1 - d and exp(d) - 1: by the polynomial near 0, where the difference would keep no digit.
  static GRPO_MC_INLINE V exp_minus_1(V d, V e) { return abs(d) < splat(0.34f) ? fma8(exp_remainder8(d), d * d, d) : e - splat(1.0f); }
  static GRPO_MC_INLINE V k3(V d, V e) { return abs(d) < splat(0.34f) ? exp_remainder8(d) * d * d : e - d - splat(1.0f); }
  static GRPO_MC_INLINE V abs(V x) { return x < splat(0.0f) ? -x : x; }
  static GRPO_MC_INLINE V clamp(V x, V low, V high) { return max8(low, min8(high, x)); }  // NaN stays NaN
  static GRPO_MC_INLINE double sum(V x) {
    double total = 0;
    for (int i = 0; i < kLanes; ++i) total += x[i];
    return total;
  }
};

struct OneDouble : One<double> {
  static constexpr int64_t kWidth = 1;
  static V load(const double* p, int64_t) { return *p; }
  static void store(double* p, int64_t, V x) { *p = x; }
  static Mask load_mask(const uint8_t* p, int64_t) { return *p != 0; }
  static double sum(V x) { return x; }
};

template <typename L>
void flush(const PolicyLaneSums<L>& s, PolicySums& out) {
  out.token_count += L::sum(s.count);
  out.ratio += L::sum(s.ratio);
  out.clip_low += L::sum(s.low);
  out.clip_high += L::sum(s.high);
  out.dual_clip += L::sum(s.dual);
  out.kl += L::sum(s.kl);
  out.entropy += L::sum(s.entropy);
  out.policy_loss += L::sum(s.policy);
  out.loss += L::sum(s.loss);
}

// One vector of tokens at offset i, n of them inside the chunk.
template <typename L, PolicyKind kKind>
GRPO_MC_INLINE void step(const PolicyTokens& p, const PolicyConstants<L>& c, int64_t i, int64_t n, PolicyLaneSums<L>& sums) {
  using S = typename L::Scalar;
  using V = typename L::V;
  const auto mask = L::load_mask(p.mask + i, n);
  const auto input = [&](const void* values) -> V {
    if (values == nullptr) return c.zero;
    const V loaded = L::load(static_cast<const S*>(values) + i, n);
    return mask ? loaded : c.zero;
  };
  const PolicyIn<L> x{input(p.logprobs), input(p.old_logprobs), input(p.advantages), input(p.ref_logprobs),
                      input(p.entropy),  input(p.weights),      input(p.sequence_ratio)};
  const PolicyOut<L> y = policy_token<L, kKind>(p, c, x);
  const V share = p.coefficients != nullptr ? input(p.coefficients) : (mask ? c.coefficient : c.zero);
  L::store(static_cast<S*>(p.grad_logprobs) + i, n, mask ? share * y.grad : c.zero);
  if (p.grad_ratio != nullptr) L::store(static_cast<S*>(p.grad_ratio) + i, n, mask ? share * y.by_ratio : c.zero);
  if (p.grad_entropy != nullptr) L::store(static_cast<S*>(p.grad_entropy) + i, n, -c.entropy_coef * share);
  add_token<L>(sums, mask, x, y, share, c);
}

template <typename L, PolicyKind kKind>
PolicySums run(const PolicyTokens& p, int64_t begin, int64_t end) {
  constexpr int64_t kFlush = 16 * kLanes;  // tokens summed in float before they join the float64 sums
  const PolicyConstants<L> c(p);
  PolicySums total;
  for (int64_t block = begin; block < end; block += kFlush) {
    PolicyLaneSums<L> sums{c.zero, c.zero, c.zero, c.zero, c.zero, c.zero, c.zero, c.zero, c.zero};
    const int64_t stop = block + kFlush < end ? block + kFlush : end;
    for (int64_t i = block; i < stop; i += L::kWidth) step<L, kKind>(p, c, i, stop - i, sums);
    flush<L>(sums, total);
  }
  return total;
}

template <typename L>
PolicySums by_kind(const PolicyTokens& p, int64_t begin, int64_t end) {
  if (p.kind == PolicyKind::kMin) return run<L, PolicyKind::kMin>(p, begin, end);
  if (p.kind == PolicyKind::kCispo) return run<L, PolicyKind::kCispo>(p, begin, end);
  return run<L, PolicyKind::kReinforce>(p, begin, end);
}

}  // namespace

PolicySums policy_loss_chunk(const PolicyTokens& tokens, Element dtype, int64_t begin, int64_t end) {
  return dtype == Element::kDouble ? by_kind<OneDouble>(tokens, begin, end) : by_kind<FloatLanes>(tokens, begin, end);
}

}  // namespace grpo_mc::GRPO_MC_ISA
