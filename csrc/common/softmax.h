// Running softmax statistics: what a higher maximum does to the sums, and what a whole row's sums say.
#pragma once

#include <cmath>

#include "common/arguments.h"
#include "common/numerics.h"

namespace grpo_mc {

// Takes the sums to a maximum that is higher than the row's. Sums of NaN stay so.
GRPO_MC_HD void raise_max(RowStats& row, double max, double inv_temperature) {
  if (row.sum > 0) {
    const double z = (row.max - max) * inv_temperature, factor = exp(z);
    row.sum_z = factor > 0 ? factor * (row.sum_z + z * row.sum) : 0.0;
    row.sum *= factor;
  }
  row.max = max;
}

struct TokenResult {
  double logprob, entropy, lse;
};

GRPO_MC_HD TokenResult token_result(const RowStats& row, double target_logit, double inv_temperature) {
  const double log_sum = log(row.sum);
  return {(target_logit - row.max) * inv_temperature - log_sum, log_sum - row.sum_z / row.sum, row.max * inv_temperature + log_sum};
}

}  // namespace grpo_mc
