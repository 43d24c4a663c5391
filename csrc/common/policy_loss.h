// The arithmetic of policy_loss for one token, or for one vector of tokens: loss, derivative and what the metrics count.
//
// Written once over a type L of lanes: eight floats of a CPU vector (cpu/policy_loss.cpp), or One<float> and One<double>
// for a thread of a GPU and for gradcheck. Masked tokens come in as zeros, so a NaN there reaches nothing.
#pragma once

#include <cmath>

#include "common/arguments.h"
#include "common/numerics.h"

namespace grpo_mc {

// exp(d) - 1 - d; of a float near 0, where the difference would keep no digit, by the polynomial.
GRPO_MC_HD float exp_minus_1_minus(float d, float e) {
  return std::fabs(d) < 0.34f ? exp_remainder(d) * d * d : e - d - 1.0f;
}
GRPO_MC_HD double exp_minus_1_minus(double d, double) { return std::expm1(d) - d; }

// A single lane.
template <typename S>
struct One {
  using Scalar = S;
  using V = S;
  using Mask = bool;
  static GRPO_MC_HD V set(double x) { return static_cast<S>(x); }
  static GRPO_MC_HD V exp(V x) { return std::exp(x); }
  static GRPO_MC_HD V exp_minus_1(V d, V) { return std::expm1(d); }
  static GRPO_MC_HD V k3(V d, V e) { return exp_minus_1_minus(d, e); }
  static GRPO_MC_HD V clamp(V x, V low, V high) { return x < low ? low : x > high ? high : x; }  // NaN stays NaN
};

template <typename L>
struct PolicyConstants {
  explicit GRPO_MC_HD PolicyConstants(const PolicyTokens& p)
      : zero(L::set(0)), one(L::set(1)), bound(L::set(kMaxExponent)), low(L::set(1 - p.clip_low)),
        high(L::set(1 + p.clip_high)), dual(L::set(p.dual_clip)), beta(L::set(p.beta)),
        entropy_coef(L::set(p.entropy_coef)), coefficient(L::set(p.coefficient)) {}
  typename L::V zero, one, bound, low, high, dual, beta, entropy_coef, coefficient;
};

// A value and its derivative by the log-prob.
template <typename L>
struct PolicyTerm {
  typename L::V value, grad;
};

// 1 where the token counts for the metric, else 0.
template <typename L>
struct ClipCounts {
  typename L::V low, high, dual;
};

// What a token brings; 0 for a masked token and for what the call was not given (`weight` and `ratio` are not read then).
template <typename L>
struct PolicyIn {
  typename L::V logprob, old_logprob, advantage, ref_logprob, entropy, weight;
  typename L::V ratio;  // the sequence's, for the gspo kinds
};

// What becomes of it, before the aggregation: `loss` and `grad` still have to be multiplied by the token's share.
template <typename L>
struct PolicyOut {
  typename L::V rho, policy, loss, grad;
  typename L::V by_ratio;  // d policy / d ratio
  typename L::V kl;
  ClipCounts<L> counts;
};

// Sums over tokens, in the order of PolicySums.
template <typename L>
struct PolicyLaneSums {
  typename L::V count, ratio, low, high, dual, kl, entropy, policy, loss;
};

// d loss / d sum of the token losses; NaN for what is no count of tokens, sequences or groups.
GRPO_MC_HD double share_of_denominator(double denominator) {
  if (!(denominator >= 0) || std::isinf(denominator)) return std::nan("");
  return denominator > 0 ? 1.0 / denominator : 0.0;
}

// exp of a sequence's mean log-ratio, and its derivative by one log-prob: 0 beyond the exponent bound.
struct SequenceRatio {
  double value, slope;
};

// From the sum of the log-ratios of its tokens in the loss, and their number.
GRPO_MC_HD SequenceRatio sequence_ratio(double sum, double tokens) {
  const double mean = tokens > 0 ? sum / tokens : 0.0;
  const double value = std::exp(mean < -kMaxExponent ? -kMaxExponent : mean > kMaxExponent ? kMaxExponent : mean);
  return {value, tokens > 0 && std::fabs(mean) <= kMaxExponent ? value / tokens : 0.0};
}

// exp(x) with the exponent clamped, and its derivative by x: 0 outside the bound.
template <typename L>
GRPO_MC_HD PolicyTerm<L> bounded_exp(typename L::V x, const PolicyConstants<L>& c) {
  const auto e = L::exp(L::clamp(x, -c.bound, c.bound));
  return {e, (x >= -c.bound) & (x <= c.bound) ? e : c.zero};
}

// -min(rho A, clip(rho) A), bounded by dual_clip; its derivative is by rho. A tie passes the full gradient.
template <typename L>
GRPO_MC_HD PolicyTerm<L> min_surrogate(typename L::V rho, typename L::V advantage, bool has_dual, const PolicyConstants<L>& c,
                                       ClipCounts<L>& counts) {
  const auto clipped_rho = L::clamp(rho, c.low, c.high);
  const auto free = rho * advantage, clipped = clipped_rho * advantage;
  const auto is_clipped = clipped < free;
  auto smaller = is_clipped ? clipped : free;
  auto slope = is_clipped ? c.zero : -advantage;
  counts.low = is_clipped & (rho < clipped_rho) ? c.one : c.zero;
  counts.high = is_clipped & (rho > clipped_rho) ? c.one : c.zero;
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
GRPO_MC_HD PolicyTerm<L> cispo_surrogate(typename L::V rho, typename L::V advantage, typename L::V logprob,
                                         const PolicyConstants<L>& c, ClipCounts<L>& counts) {
  const auto clipped_rho = L::clamp(rho, c.low, c.high);
  counts.low = rho < clipped_rho ? c.one : c.zero;
  counts.high = rho > clipped_rho ? c.one : c.zero;
  const auto slope = -clipped_rho * advantage;
  return {slope * logprob, slope};
}

template <typename L>
GRPO_MC_HD PolicyTerm<L> kl_estimate(KlKind kind, typename L::V d, const PolicyConstants<L>& c) {
  if (kind == KlKind::kK1) return {-d, c.one};
  if (kind == KlKind::kK2) return {d * d * L::set(0.5), -d};
  const auto bounded = L::clamp(d, -c.bound, c.bound);
  const auto e = L::exp(bounded);
  return {L::k3(bounded, e), (d >= -c.bound) & (d <= c.bound) ? -L::exp_minus_1(bounded, e) : c.zero};
}

// The KL term as it enters the loss: value and gradient of the form asked for.
template <typename L>
GRPO_MC_HD PolicyTerm<L> kl_term(KlGradient form, const PolicyTerm<L>& k, typename L::V d, const PolicyTerm<L>& rho) {
  if (form == KlGradient::kDirect) return k;
  if (form == KlGradient::kK2) return {k.value, -d};
  return {rho.value * k.value, rho.grad * k.value + rho.value * k.grad};
}

// `p` tells which terms there are; of its pointers only their absence is asked for.
template <typename L, PolicyKind kKind>
GRPO_MC_HD PolicyOut<L> policy_token(const PolicyTokens& p, const PolicyConstants<L>& c, const PolicyIn<L>& x) {
  const PolicyTerm<L> own = bounded_exp<L>(x.logprob - x.old_logprob, c);
  PolicyOut<L> out;
  out.rho = p.has_sequence_ratio ? x.ratio : own.value;
  out.counts = {c.zero, c.zero, c.zero};
  out.by_ratio = out.kl = c.zero;
  PolicyTerm<L> policy{-x.advantage * x.logprob, -x.advantage};  // reinforce
  if constexpr (kKind == PolicyKind::kMin) {
    policy = min_surrogate<L>(out.rho, x.advantage, p.dual_clip > 0, c, out.counts);
    out.by_ratio = policy.grad;
    // The derivative of the ratio by this token's log-prob: its own form, s_t, or (gspo) through the whole sequence.
    policy.grad = out.by_ratio * (!p.has_sequence_ratio ? own.grad : p.grad_ratio == nullptr ? out.rho : c.zero);
  } else if constexpr (kKind == PolicyKind::kCispo) {
    policy = cispo_surrogate<L>(out.rho, x.advantage, x.logprob, c, out.counts);
  }
  if (p.weights != nullptr) {
    policy = {policy.value * x.weight, policy.grad * x.weight};
    out.by_ratio = out.by_ratio * x.weight;
  }
  out.policy = out.loss = policy.value;
  out.grad = policy.grad;
  if (p.kl != KlKind::kNone) {
    const auto d = x.ref_logprob - x.logprob;
    const PolicyTerm<L> k = kl_estimate<L>(p.kl, d, c);
    if (p.beta != 0) {
      const PolicyTerm<L> term = kl_term<L>(p.kl_gradient, k, d, own);
      out.loss = out.loss + c.beta * term.value;
      out.grad = out.grad + c.beta * term.grad;
    }
    out.kl = k.value;
  }
  if (p.entropy_coef != 0) out.loss = out.loss - c.entropy_coef * x.entropy;
  return out;
}

template <typename L>
GRPO_MC_HD void add_token(PolicyLaneSums<L>& sums, typename L::Mask mask, const PolicyIn<L>& x, const PolicyOut<L>& y,
                          typename L::V share, const PolicyConstants<L>& c) {
  sums.count = sums.count + (mask ? c.one : c.zero);
  sums.ratio = sums.ratio + (mask ? y.rho : c.zero);
  sums.low = sums.low + (mask ? y.counts.low : c.zero);
  sums.high = sums.high + (mask ? y.counts.high : c.zero);
  sums.dual = sums.dual + (mask ? y.counts.dual : c.zero);
  sums.kl = sums.kl + (mask ? y.kl : c.zero);
  sums.entropy = sums.entropy + x.entropy;
  sums.policy = sums.policy + (mask ? y.policy : c.zero);
  sums.loss = sums.loss + (mask ? share * y.loss : c.zero);
}

}  // namespace grpo_mc
