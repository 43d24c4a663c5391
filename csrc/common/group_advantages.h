// Group advantages from the statistics of a group: which rewards count, what they are divided by.
#pragma once

#include <cmath>

#include "common/arguments.h"
#include "common/numerics.h"

namespace grpo_mc {

// leave_one_out_std divides only where the std of the others is above eps and above this fraction of the group's std.
constexpr double kLeaveOneOutFloor = 1e-3;

GRPO_MC_HD double std_of_squares(double squares, double n, double ddof) { return n - ddof < 1 ? 0.0 : std::sqrt(squares / (n - ddof)); }

// std (ddof 1) of all values but one, from the deviations of the whole group: sum of squares around the others' mean.
GRPO_MC_HD double std_of_others(double squares, double deviation, double n) {
  if (n < 3) return 0.0;
  const double others = squares - deviation * deviation * n / (n - 1);
  return others > 0 ? std::sqrt(others / (n - 2)) : 0.0;
}

// A group of at least two rewards, not all equal: how many, their mean, the sum of squares around it.
struct AdvantageGroup {
  GRPO_MC_HD AdvantageGroup(double n_, double mean_, double squares_, const AdvantageOptions& options, double batch_std)
      : n(n_), mean(mean_), squares(squares_) {
    divisor = options.scale == AdvantageScale::kStd        ? std_of_squares(squares, n, options.ddof) + options.eps
              : options.scale == AdvantageScale::kBatchStd ? batch_std + options.eps
                                                           : 1.0;
    const double part = kLeaveOneOutFloor * std::sqrt(squares / n);
    floor = options.eps > part ? options.eps : part;
  }

  GRPO_MC_HD double advantage(double reward, const AdvantageOptions& options) const {
    const double deviation = reward - mean;
    // r_i minus the mean of the others is n / (n - 1) times r_i minus the mean of all.
    const double value = options.leave_one_out ? deviation * n / (n - 1) : deviation;
    if (options.scale != AdvantageScale::kLeaveOneOutStd) return value / divisor;
    const double others = std_of_others(squares, deviation, n);
    return others > floor ? value / (others + options.eps) : value;
  }

  double n, mean, squares, divisor, floor;
};

}  // namespace grpo_mc
