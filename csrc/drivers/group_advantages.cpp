// group_advantages: float64 statistics of each group in two passes, the groups found by sorting the ids. The formulas are in
// common/group_advantages.h.
#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string_view>
#include <vector>

#include "common/group_advantages.h"
#include "drivers/checks.h"
#include "drivers/device.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;
constexpr const char* kOp = "group_advantages";

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double squares_around(const std::vector<double>& values, double mean) {
  double total = 0;
  for (const double value : values) total += (value - mean) * (value - mean);
  return total;
}

// Replaces the rewards of one group of at least two, not all equal, by their advantages.
void one_group(std::vector<double>& r, const AdvantageOptions& options, double batch_std) {
  const double mean = mean_of(r);
  const AdvantageGroup group(static_cast<double>(r.size()), mean, squares_around(r, mean), options, batch_std);
  for (double& value : r) value = group.advantage(value, options);
}

void check(const Tensor& rewards, const Tensor& group_ids, const std::optional<Tensor>& valid, std::string_view baseline,
           std::string_view scale, int64_t ddof, double eps) {
  TORCH_CHECK_VALUE(rewards.dim() == 1 && (rewards.scalar_type() == at::kFloat || rewards.scalar_type() == at::kDouble), kOp,
                    ": rewards are ", rewards.scalar_type(), rewards.sizes(), "; they must be Float or Double [N]");
  check_vector(kOp, "group_ids", group_ids, rewards.size(0), at::kLong);
  if (valid.has_value()) check_vector(kOp, "valid", *valid, rewards.size(0), at::kBool);
  TORCH_CHECK_VALUE(baseline == "mean" || baseline == "leave_one_out", kOp, ": baseline is '", baseline,
                    "'; use mean or leave_one_out");
  TORCH_CHECK_VALUE(scale == "std" || scale == "leave_one_out_std" || scale == "batch_std" || scale == "none", kOp,
                    ": scale is '", scale, "'; use std, leave_one_out_std, batch_std or none");
  TORCH_CHECK_VALUE(ddof == 0 || ddof == 1, kOp, ": ddof is ", ddof,
                    "; use 0 (population std) or 1 (sample std)");
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps), kOp, ": eps is ", eps,
                    "; it must be finite and at least 0");
}

AdvantageScale scale_of(std::string_view scale) {
  return scale == "std"                 ? AdvantageScale::kStd
         : scale == "leave_one_out_std" ? AdvantageScale::kLeaveOneOutStd
         : scale == "batch_std"         ? AdvantageScale::kBatchStd
                                        : AdvantageScale::kNone;
}

Tensor on_cuda(const Tensor& rewards, const Tensor& group_ids, const std::optional<Tensor>& valid, const AdvantageOptions& options) {
  const Tensor values = rewards.contiguous(), out = at::empty({rewards.numel()}, rewards.options());
  if (out.numel() == 0) return out;
  const Tensor usable = valid.has_value() ? valid->contiguous() : Tensor();
  const auto [ids, order] = at::sort(group_ids, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const Tensor batch_std = options.scale == AdvantageScale::kBatchStd ? at::empty({1}, rewards.options().dtype(at::kDouble)) : Tensor();
  GroupAdvantages p{};
  p.rewards = values.const_data_ptr();
  p.valid = usable.defined() ? usable.const_data_ptr<bool>() : nullptr;
  p.ids = ids.const_data_ptr<int64_t>();
  p.order = order.const_data_ptr<int64_t>();
  p.out = out.mutable_data_ptr();
  p.batch_std = batch_std.defined() ? batch_std.mutable_data_ptr<double>() : nullptr;
  p.count = rewards.numel();
  p.options = options;
  p.dtype = rewards.scalar_type() == at::kDouble ? Element::kDouble : Element::kFloat;
  launch(kOp, &CudaKernels::group_advantages, p, rewards);
  return out;
}

Tensor group_advantages(const Tensor& rewards, const Tensor& group_ids, const std::optional<Tensor>& valid,
                        std::string_view baseline, std::string_view scale, int64_t ddof, double eps) {
  check(rewards, group_ids, valid, baseline, scale, ddof, eps);
  const AdvantageOptions options{eps, static_cast<double>(ddof), scale_of(scale), baseline == "leave_one_out"};
  if (runs_on_cuda(rewards)) return on_cuda(rewards, group_ids, valid, options);
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
  const double batch_std = std_of_squares(all.empty() ? 0.0 : squares_around(all, mean_of(all)), static_cast<double>(all.size()), options.ddof);
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

GRPO_MC_OPERATORS(m) { m.impl("group_advantages", group_advantages); }

}  // namespace grpo_mc
