// group_advantages on the CPU: float64 statistics of each group in two passes, the groups found by id.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string_view>
#include <vector>

#include "drivers/checks.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;
constexpr const char* kOp = "group_advantages";
// leave_one_out_std divides only where the std of the others is above eps and above this fraction of the group's std.
constexpr double kLeaveOneOutFloor = 1e-3;

struct Options {
  bool leave_one_out;
  std::string_view scale;
  int64_t ddof;
  double eps;
};

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double squares_around(const std::vector<double>& values, double mean) {
  double total = 0;
  for (const double value : values) total += (value - mean) * (value - mean);
  return total;
}

double std_of(const std::vector<double>& values, int64_t ddof) {
  const int64_t count = static_cast<int64_t>(values.size()) - ddof;
  return count < 1 ? 0.0 : std::sqrt(squares_around(values, mean_of(values)) / static_cast<double>(count));
}

// std (ddof 1) of all values but one, from the deviations of the whole group: sum of squares around the others' mean.
double std_of_others(double squares, double deviation, double n) {
  if (n < 3) return 0.0;
  const double others = squares - deviation * deviation * n / (n - 1);
  return others > 0 ? std::sqrt(others / (n - 2)) : 0.0;
}

// Replaces the rewards of one group of at least two, not all equal, by their advantages.
void one_group(std::vector<double>& r, const Options& options, double batch_std) {
  const double n = static_cast<double>(r.size()), mean = mean_of(r), squares = squares_around(r, mean);
  const double divisor = options.scale == "std" ? std_of(r, options.ddof) + options.eps
                         : options.scale == "batch_std" ? batch_std + options.eps
                                                        : 1.0;
  const double floor = std::max(options.eps, kLeaveOneOutFloor * std::sqrt(squares / n));
  for (double& value : r) {
    const double deviation = value - mean;
    // r_i minus the mean of the others is n / (n - 1) times r_i minus the mean of all.
    value = options.leave_one_out ? deviation * n / (n - 1) : deviation;
    if (options.scale != "leave_one_out_std") {
      value /= divisor;
      continue;
    }
    const double others = std_of_others(squares, deviation, n);
    if (others > floor) value /= others + options.eps;
  }
}

void check(const Tensor& rewards, const Tensor& group_ids, const std::optional<Tensor>& valid, std::string_view baseline,
           const Options& options) {
  TORCH_CHECK_VALUE(rewards.dim() == 1 && (rewards.scalar_type() == at::kFloat || rewards.scalar_type() == at::kDouble), kOp,
                    ": rewards are ", rewards.scalar_type(), rewards.sizes(), "; they must be Float or Double [N]");
  check_vector(kOp, "group_ids", group_ids, rewards.size(0), at::kLong);
  if (valid.has_value()) check_vector(kOp, "valid", *valid, rewards.size(0), at::kBool);
  TORCH_CHECK_VALUE(baseline == "mean" || baseline == "leave_one_out", kOp, ": baseline is '", baseline,
                    "'; use mean or leave_one_out");
  const std::string_view scale = options.scale;
  TORCH_CHECK_VALUE(scale == "std" || scale == "leave_one_out_std" || scale == "batch_std" || scale == "none", kOp,
                    ": scale is '", scale, "'; use std, leave_one_out_std, batch_std or none");
  TORCH_CHECK_VALUE(options.ddof == 0 || options.ddof == 1, kOp, ": ddof is ", options.ddof,
                    "; use 0 (population std) or 1 (sample std)");
  TORCH_CHECK_VALUE(options.eps >= 0 && std::isfinite(options.eps), kOp, ": eps is ", options.eps,
                    "; it must be finite and at least 0");
}

Tensor group_advantages(const Tensor& rewards, const Tensor& group_ids, const std::optional<Tensor>& valid,
                        std::string_view baseline, std::string_view scale, int64_t ddof, double eps) {
  const Options options{baseline == "leave_one_out", scale, ddof, eps};
  check(rewards, group_ids, valid, baseline, options);
  const Tensor wide = rewards.to(at::kDouble).contiguous(), ids = group_ids.contiguous();
  const Tensor usable = valid.has_value() ? valid->contiguous() : Tensor();
  const double* reward = wide.const_data_ptr<double>();
  const int64_t* id = ids.const_data_ptr<int64_t>();

  std::vector<int64_t> rows;  // the valid rollouts, groups together, in their order within a group
  std::vector<double> all;
  for (int64_t i = 0; i < wide.numel(); ++i) {
    const bool is_valid = !usable.defined() || usable.const_data_ptr<bool>()[i];
    if (!is_valid || !std::isfinite(reward[i])) continue;
    rows.push_back(i);
    all.push_back(reward[i]);
  }
  const double batch_std = scale == "batch_std" && !all.empty() ? std_of(all, ddof) : 0.0;
  std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return id[a] < id[b]; });
  std::vector<int64_t> starts;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i == 0 || id[rows[i]] != id[rows[i - 1]]) starts.push_back(static_cast<int64_t>(i));
  }
  starts.push_back(static_cast<int64_t>(rows.size()));

  const Tensor out = at::zeros({wide.numel()}, wide.options());
  double* advantage = out.mutable_data_ptr<double>();
  parallel_for(static_cast<int64_t>(starts.size()) - 1, 64, [&](int64_t begin, int64_t end) {
    std::vector<double> group;
    for (int64_t g = begin; g < end; ++g) {
      const int64_t first = starts[static_cast<size_t>(g)], last = starts[static_cast<size_t>(g + 1)];
      group.clear();
      for (int64_t i = first; i < last; ++i) group.push_back(reward[rows[static_cast<size_t>(i)]]);
      const auto [low, high] = std::minmax_element(group.begin(), group.end());
      if (group.size() < 2 || *low == *high) continue;  // exactly 0: no signal, and no 0 / 0
      one_group(group, options, batch_std);
      for (int64_t i = first; i < last; ++i) advantage[rows[static_cast<size_t>(i)]] = group[static_cast<size_t>(i - first)];
    }
  });
  return out.to(rewards.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(grpo_mc, CPU, m) { m.impl("group_advantages", group_advantages); }

}  // namespace grpo_mc
