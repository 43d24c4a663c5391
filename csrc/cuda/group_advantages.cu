// nvcc: sm_80 sm_90 sm_100
// group_advantages: a warp takes 32 rollouts that are sorted by group, and computes the groups that begin among them.
//
// A batch is thousands of rollouts of 16 bytes: the launches and torch's sort of the ids bound it. Statistics are float64,
// in two passes, the lanes' sums added in a fixed order; they may differ from the CPU's in the last bit of a double.
#include "common/group_advantages.h"
#include "cuda/launchers.h"
#include "cuda/pack.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kThreads = 128, kStdThreads = 1024;

// The rollout's reward, and whether it counts.
struct Reward {
  double value;
  bool counts;
};

template <typename T>
__device__ __forceinline__ Reward reward_of(const GroupAdvantages& p, int64_t rollout) {
  const double value = static_cast<double>(static_cast<const T*>(p.rewards)[rollout]);
  return {value, isfinite(value) && (p.valid == nullptr || p.valid[rollout])};
}

// One lane's rollouts of the group that begins at sorted position `begin`: f(rollout) for each of them.
template <typename F>
__device__ __forceinline__ void each_of_group(const GroupAdvantages& p, int64_t begin, int64_t id, const F& f) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t i = begin;; i += kWarp) {
    const bool is_in = i + lane < p.count && p.ids[i + lane] == id;
    if (is_in) f(p.order[i + lane]);
    if (!__all_sync(kAllLanes, is_in)) return;  // sorted: nothing of the group follows
  }
}

template <typename T>
__device__ __forceinline__ void one_group(const GroupAdvantages& p, int64_t begin) {
  const int64_t id = p.ids[begin];
  double n = 0, sum = 0, high = -HUGE_VAL, low = HUGE_VAL;
  each_of_group(p, begin, id, [&](int64_t rollout) {
    const Reward r = reward_of<T>(p, rollout);
    if (!r.counts) return;
    n += 1;
    sum += r.value;
    high = r.value > high ? r.value : high;
    low = r.value < low ? r.value : low;
  });
  n = warp_sum(n);
  sum = warp_sum(sum);
  high = warp_max(high);
  low = -warp_max(-low);
  const double mean = sum / n;
  double squares = 0;
  each_of_group(p, begin, id, [&](int64_t rollout) {
    const Reward r = reward_of<T>(p, rollout);
    if (r.counts) squares += (r.value - mean) * (r.value - mean);
  });
  const AdvantageGroup group(n, mean, warp_sum(squares), p.options, p.batch_std == nullptr ? 0.0 : *p.batch_std);
  const bool has_signal = n >= 2 && low != high;  // else exactly 0, and no 0 / 0
  each_of_group(p, begin, id, [&](int64_t rollout) {
    const Reward r = reward_of<T>(p, rollout);
    static_cast<T*>(p.out)[rollout] = has_signal && r.counts ? static_cast<T>(group.advantage(r.value, p.options)) : T{0};
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) groups_of_rollouts(GroupAdvantages p) {
  const int lane = threadIdx.x % kWarp;
  constexpr int kWarps = kThreads / kWarp;
  const int64_t spans = (p.count + kWarp - 1) / kWarp;
  for (int64_t span = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; span < spans; span += int64_t{gridDim.x} * kWarps) {
    const int64_t i = span * kWarp + lane;
    unsigned begins = __ballot_sync(kAllLanes, i < p.count && (i == 0 || p.ids[i] != p.ids[i - 1]));
    for (; begins != 0; begins &= begins - 1) one_group<T>(p, span * kWarp + __ffs(static_cast<int>(begins)) - 1);
  }
}

// std of all rewards that count. One block: two passes over what fits in the cache.
template <typename T>
__global__ void __launch_bounds__(kStdThreads) std_of_batch(GroupAdvantages p) {
  __shared__ double scratch[kWarp];
  double n = 0, sum = 0, squares = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < p.count; i += kStdThreads) {
    const Reward r = reward_of<T>(p, i);
    n += r.counts ? 1 : 0;
    sum += r.counts ? r.value : 0;
  }
  n = block_sum(n, scratch);
  const double mean = block_sum(sum, scratch) / n;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < p.count; i += kStdThreads) {
    const Reward r = reward_of<T>(p, i);
    squares += r.counts ? (r.value - mean) * (r.value - mean) : 0;
  }
  squares = block_sum(squares, scratch);
  if (threadIdx.x == 0) *p.batch_std = std_of_squares(squares, n, p.options.ddof);
}

template <typename T>
const char* run(const GroupAdvantages& p, void* stream) {
  const char* problem = p.batch_std != nullptr ? launch(std_of_batch<T>, 1, kStdThreads, 0, stream, p) : nullptr;
  return problem != nullptr ? problem : launch(groups_of_rollouts<T>, blocks_for((p.count + kThreads - 1) / kThreads), kThreads, 0, stream, p);
}

}  // namespace

const char* group_advantages(const GroupAdvantages& p, void* stream) {
  return p.dtype == Element::kDouble ? run<double>(p, stream) : run<float>(p, stream);
}

}  // namespace grpo_mc::cuda
