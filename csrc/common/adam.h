// Adam with decoupled weight decay (AdamW, arXiv 1711.05101), one entry at a time, for host and device.
//
//     g = grad * clip_coef / grad_scale            m += (1 - beta1) * (g - m)        v = beta2 * v + (1 - beta2) * g * g
//     param = param * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
//
// The factors are computed once, in float64, and rounded to float32; every operation of an entry is rounded to float32 on
// its own (no fused multiply-add), so that all instruction sets and devices agree bit for bit.
#pragma once

#include <cmath>

#include "common/arguments.h"
#include "common/numerics.h"

namespace grpo_mc {

inline AdamFactors adam_factors(double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step, double grad_scale,
                                double clip_coef) {
  const double count = static_cast<double>(step);
  AdamFactors f{};
  f.grad = static_cast<float>(clip_coef / grad_scale);
  f.decay = static_cast<float>(1.0 - lr * weight_decay);
  f.rest1 = static_cast<float>(1.0 - beta1);
  f.beta2 = static_cast<float>(beta2);
  f.rest2 = static_cast<float>(1.0 - beta2);
  f.step_size = static_cast<float>(lr / (1.0 - std::pow(beta1, count)));
  f.root = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, count)));
  f.eps = static_cast<float>(eps);
  return f;
}

// One entry's update, in place.
GRPO_MC_HD void adam_update(const AdamFactors& f, float grad, float& param, float& m, float& v) {
  const float g = grad * f.grad;
  m = m + f.rest1 * (g - m);
  v = v * f.beta2 + f.rest2 * g * g;
  param = param * f.decay - f.step_size * (m / (std::sqrt(v) * f.root + f.eps));
}

}  // namespace grpo_mc
