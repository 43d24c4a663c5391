// Token kernel of policy_loss: the loss of each token, its derivative and the metric sums, in one pass.
//
// Written once over a vector type: eight float lanes, or one double (gradcheck). Masked tokens are replaced by zeros
// before any arithmetic, so a NaN there reaches nothing.
#include <cmath>

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

struct OneDouble {
  using Scalar = double;
  using V = double;
  using Mask = bool;
  static constexpr int64_t kWidth = 1;
  static V set(double x) { return x; }
  static V load(const double* p, int64_t) { return *p; }
  static void store(double* p, int64_t, V x) { *p = x; }
  static Mask load_mask(const uint8_t* p, int64_t) { return *p != 0; }
  static V exp(V x) { return std::exp(x); }
  static V exp_minus_1(V d, V) { return std::expm1(d); }
  static V k3(V d, V) { return std::expm1(d) - d; }
  static V clamp(V x, V low, V high) { return x < low ? low : x > high ? high : x; }
  static double sum(V x) { return x; }
};

template <typename L>
struct Constants {
  explicit Constants(const PolicyTokens& p)
      : zero(L::set(0)), one(L::set(1)), bound(L::set(kMaxExponent)), low(L::set(1 - p.clip_low)),
        high(L::set(1 + p.clip_high)), dual(L::set(p.dual_clip)), beta(L::set(p.beta)),
        entropy_coef(L::set(p.entropy_coef)), coefficient(L::set(p.coefficient)) {}
  typename L::V zero, one, bound, low, high, dual, beta, entropy_coef, coefficient;
};

// A value and its derivative by the log-prob.
template <typename L>
struct Term {
  typename L::V value, grad;
};

template <typename L>
struct Counts {
  typename L::V low, high, dual;
};

// exp(x) with the exponent clamped, and its derivative by x: 0 outside the bound.
template <typename L>
GRPO_MC_INLINE Term<L> bounded_exp(typename L::V x, const Constants<L>& c) {
  const auto e = L::exp(L::clamp(x, -c.bound, c.bound));
  return {e, (x >= -c.bound) & (x <= c.bound) ? e : c.zero};
}

// -min(rho A, clip(rho) A), bounded by dual_clip; its derivative is by rho. A tie passes the full gradient.
template <typename L>
GRPO_MC_INLINE Term<L> min_surrogate(typename L::V rho, typename L::V advantage, bool has_dual, const Constants<L>& c,
                                     Counts<L>& counts) {
  const auto clipped_rho = L::clamp(rho, c.low, c.high);
  const auto free = rho * advantage, clipped = clipped_rho * advantage;
  const auto is_clipped = clipped < free;
  auto smaller = is_clipped ? clipped : free;
  auto slope = is_clipped ? c.zero : -advantage;
  counts.low = is_clipped & (rho < clipped_rho) ? c.one : c.zero;
  counts.high = is_clipped & (rho > clipped_rho) ? c.one : c.zero;
  counts.dual = c.zero;
  if (has_dual) {
    const auto bound = c.dual * advantage;
    const auto is_bound = (advantage < c.zero) & (bound > smaller);
    smaller = is_bound ? bound : smaller;
    slope = is_bound ? c.zero : slope;
    counts.dual = is_bound ? c.one : c.zero;
  }
  return {-smaller, slope};
}

template <typename L>
GRPO_MC_INLINE Term<L> cispo_surrogate(typename L::V rho, typename L::V advantage, typename L::V logprob,
                                       const Constants<L>& c, Counts<L>& counts) {
  const auto clipped_rho = L::clamp(rho, c.low, c.high);
  counts = {rho < clipped_rho ? c.one : c.zero, rho > clipped_rho ? c.one : c.zero, c.zero};
  const auto slope = -clipped_rho * advantage;
  return {slope * logprob, slope};
}

template <typename L>
GRPO_MC_INLINE Term<L> kl_estimate(KlKind kind, typename L::V d, const Constants<L>& c) {
  if (kind == KlKind::kK1) return {-d, c.one};
  if (kind == KlKind::kK2) return {d * d * L::set(0.5), -d};
  const auto bounded = L::clamp(d, -c.bound, c.bound);
  const auto e = L::exp(bounded);
  return {L::k3(bounded, e), (d >= -c.bound) & (d <= c.bound) ? -L::exp_minus_1(bounded, e) : c.zero};
}

// The KL term as it enters the loss: value and gradient of the form asked for.
template <typename L>
GRPO_MC_INLINE Term<L> kl_term(KlGradient form, const Term<L>& k, typename L::V d, const Term<L>& rho) {
  if (form == KlGradient::kDirect) return k;
  if (form == KlGradient::kK2) return {k.value, -d};
  return {rho.value * k.value, rho.grad * k.value + rho.value * k.grad};
}

template <typename L>
struct Sums {
  typename L::V count, ratio, low, high, dual, kl, entropy, policy, loss;
};

template <typename L>
void flush(const Sums<L>& s, PolicySums& out) {
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
GRPO_MC_INLINE void step(const PolicyTokens& p, const Constants<L>& c, int64_t i, int64_t n, Sums<L>& sums) {
  using S = typename L::Scalar;
  using V = typename L::V;
  const auto mask = L::load_mask(p.mask + i, n);
  const auto input = [&](const void* values) -> V {
    const V loaded = L::load(static_cast<const S*>(values) + i, n);
    return mask ? loaded : c.zero;
  };
  const V logprob = input(p.logprobs), advantage = input(p.advantages);
  const Term<L> own = bounded_exp<L>(logprob - input(p.old_logprobs), c);
  const V rho = p.sequence_ratio != nullptr ? input(p.sequence_ratio) : own.value;

  Counts<L> counts{c.zero, c.zero, c.zero};
  Term<L> policy{-advantage * logprob, -advantage};  // reinforce
  V by_ratio = c.zero;
  if constexpr (kKind == PolicyKind::kMin) {
    policy = min_surrogate<L>(rho, advantage, p.dual_clip > 0, c, counts);
    by_ratio = policy.grad;
    // The derivative of the ratio by this token's log-prob: its own form, s_t, or (gspo) through the whole sequence.
    policy.grad = by_ratio * (p.sequence_ratio == nullptr ? own.grad : p.grad_ratio == nullptr ? rho : c.zero);
  } else if constexpr (kKind == PolicyKind::kCispo) {
    policy = cispo_surrogate<L>(rho, advantage, logprob, c, counts);
  }
  if (p.weights != nullptr) {
    const V weight = input(p.weights);
    policy = {policy.value * weight, policy.grad * weight};
    by_ratio = by_ratio * weight;
  }
  V loss = policy.value, grad = policy.grad;
  if (p.kl != KlKind::kNone) {
    const V d = input(p.ref_logprobs) - logprob;
    const Term<L> k = kl_estimate<L>(p.kl, d, c);
    if (p.beta != 0) {
      const Term<L> term = kl_term<L>(p.kl_gradient, k, d, own);
      loss = loss + c.beta * term.value;
      grad = grad + c.beta * term.grad;
    }
    sums.kl = sums.kl + (mask ? k.value : c.zero);
  }
  if (p.entropy != nullptr) {
    const V entropy = input(p.entropy);
    if (p.entropy_coef != 0) loss = loss - c.entropy_coef * entropy;
    sums.entropy = sums.entropy + entropy;
  }
  const V share = p.coefficients != nullptr ? input(p.coefficients) : (mask ? c.coefficient : c.zero);
  L::store(static_cast<S*>(p.grad_logprobs) + i, n, mask ? share * grad : c.zero);
  if (p.grad_ratio != nullptr) L::store(static_cast<S*>(p.grad_ratio) + i, n, mask ? share * by_ratio : c.zero);
  if (p.grad_entropy != nullptr) L::store(static_cast<S*>(p.grad_entropy) + i, n, -c.entropy_coef * share);
  sums.count = sums.count + (mask ? c.one : c.zero);
  sums.ratio = sums.ratio + (mask ? rho : c.zero);
  sums.low = sums.low + (mask ? counts.low : c.zero);
  sums.high = sums.high + (mask ? counts.high : c.zero);
  sums.dual = sums.dual + (mask ? counts.dual : c.zero);
  sums.policy = sums.policy + (mask ? policy.value : c.zero);
  sums.loss = sums.loss + (mask ? share * loss : c.zero);
}

template <typename L, PolicyKind kKind>
PolicySums run(const PolicyTokens& p, int64_t begin, int64_t end) {
  constexpr int64_t kFlush = 16 * kLanes;  // tokens summed in float before they join the float64 sums
  const Constants<L> c(p);
  PolicySums total;
  for (int64_t block = begin; block < end; block += kFlush) {
    Sums<L> sums{c.zero, c.zero, c.zero, c.zero, c.zero, c.zero, c.zero, c.zero, c.zero};
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
