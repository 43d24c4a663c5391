// Row kernels of token_logprobs: softmax statistics in one pass, and the gradient from the saved log-sum-exp.
#include <cmath>

#include "common/softmax.h"
#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

constexpr int64_t kBlock = 2048;  // columns whose maximum is taken before their exp: 8 KB of float, in L1
constexpr int64_t kPart = 512;    // columns summed in float lanes (32 additions each) before they join the float64 sums

template <typename T>
GRPO_MC_INLINE F8 load_or_tail(const T* x, int64_t left, float fill) {
  return left >= kLanes ? load8(x) : load_tail(x, left, fill);
}

template <typename T>
float block_max(const T* x, int64_t n) {
  F8 best[4] = {splat(-kInf), splat(-kInf), splat(-kInf), splat(-kInf)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) best[k] = max8(load8(x + i + k * kLanes), best[k]);  // a NaN is dropped here
  }
  for (; i < n; i += kLanes) best[0] = max8(load_or_tail(x + i, n - i, -kInf), best[0]);
  return reduce_max8(max8(max8(best[0], best[1]), max8(best[2], best[3])));
}

struct PartSums {
  float sum, sum_z;
};

template <bool kSumZ, typename T>
PartSums part_sums(const T* x, int64_t n, float max, float inv_temperature) {
  // exp8 is 0 below -87.3, so bounding z there keeps 0 * z finite for a logit of -inf. A NaN passes through max8.
  const F8 vmax = splat(max), scale = splat(inv_temperature), lowest = splat(-104.0f);
  F8 sum[2] = {splat(0.0f), splat(0.0f)}, sum_z[2] = {splat(0.0f), splat(0.0f)};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    __builtin_prefetch(x + i + kBlock);
    for (int k = 0; k < 2; ++k) {
      const F8 z = max8(lowest, (load8(x + i + k * kLanes) - vmax) * scale);
      const F8 e = exp8(z);
      sum[k] += e;
      if (kSumZ) sum_z[k] = fma8(e, z, sum_z[k]);
    }
  }
  for (; i < n; i += kLanes) {
    const F8 z = max8(lowest, (load_or_tail(x + i, n - i, -kInf) - vmax) * scale);
    const F8 e = exp8(z);
    sum[0] += e;
    if (kSumZ) sum_z[0] = fma8(e, z, sum_z[0]);
  }
  return {sum8(sum[0] + sum[1]), sum8(sum_z[0] + sum_z[1])};
}

template <typename T>
bool has_nan(const T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float value = load_tail(x + i, 1, 0.0f)[0];
    if (value != value) return true;
  }
  return false;
}

// One pass over memory: each block is read for its maximum and again, from L1, for its sums; the running sums are
// rescaled when the maximum rises. Across parts the sums are float64, so the error does not grow with the vocabulary.
template <bool kSumZ, typename T>
RowStats stats(const T* x, int64_t n, double inv_temperature) {
  RowStats row{-std::numeric_limits<double>::infinity(), 0.0, 0.0};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t size = n - begin < kBlock ? n - begin : kBlock;
    const float best = block_max(x + begin, size);
    if (best > row.max) raise_max(row, best, inv_temperature);
    if (row.max == -std::numeric_limits<double>::infinity()) {
      if (has_nan(x + begin, size)) return {row.max, NAN, NAN};
      continue;  // only -inf so far: nothing to add
    }
    for (int64_t i = begin; i < begin + size; i += kPart) {
      const int64_t columns = begin + size - i < kPart ? begin + size - i : kPart;
      const PartSums part =
          part_sums<kSumZ>(x + i, columns, static_cast<float>(row.max), static_cast<float>(inv_temperature));
      row.sum += part.sum;
      row.sum_z += part.sum_z;
    }
  }
  return row;
}

RowStats stats_double(const double* x, int64_t n, double inv_temperature) {
  RowStats row{-std::numeric_limits<double>::infinity(), 0.0, 0.0};
  for (int64_t i = 0; i < n; ++i) row.max = x[i] > row.max ? x[i] : row.max;
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] == -std::numeric_limits<double>::infinity()) continue;
    const double z = (x[i] - row.max) * inv_temperature, e = std::exp(z);
    row.sum += e;
    row.sum_z += e * z;
  }
  return row;
}

template <typename T>
void grad(const RowGrad& row) {
  const T* x = static_cast<const T*>(row.logits);
  T* out = static_cast<T*>(row.out);
  // z - lse = (x - high) * inv_temperature - low, with x - high exact near the maximum: logits of 1e4 lose nothing.
  const float high = static_cast<float>(row.lse / row.inv_temperature);
  const F8 vhigh = splat(high), scale = splat(static_cast<float>(row.inv_temperature));
  const F8 low = splat(static_cast<float>(row.lse - static_cast<double>(high) * row.inv_temperature));
  const F8 constant = splat(static_cast<float>(-row.inv_temperature * (row.grad_logprob + row.grad_entropy * row.entropy)));
  const F8 slope = splat(static_cast<float>(-row.inv_temperature * row.grad_entropy));
  const F8 lowest = splat(-104.0f);
  const auto value = [&](F8 logit) {
    const F8 logp = max8(lowest, (logit - vhigh) * scale - low);
    return exp8(logp) * fma8(slope, logp, constant);
  };
  const float at_target = row.target < 0 ? 0.0f
                                         : value(load_tail(x + row.target, 1, 0.0f))[0] +
                                               static_cast<float>(row.inv_temperature * row.grad_logprob);
  int64_t i = 0;
  for (; i + 2 * kLanes <= row.num_valid; i += 2 * kLanes) {
    const F8 first = value(load8(x + i)), second = value(load8(x + i + kLanes));
    store8(out + i, first);
    store8(out + i + kLanes, second);
  }
  for (; i < row.num_valid; i += kLanes) {
    const int64_t left = row.num_valid - i < kLanes ? row.num_valid - i : kLanes;
    store_tail(out + i, left, value(load_tail(x + i, left, -kInf)));
  }
  if (row.target >= 0) store_tail(out + row.target, 1, splat(at_target));
}

void grad_double(const RowGrad& row) {
  const double* x = static_cast<const double*>(row.logits);
  double* out = static_cast<double*>(row.out);
  for (int64_t i = 0; i < row.num_valid; ++i) {
    const double logp = x[i] * row.inv_temperature - row.lse, p = std::exp(logp);
    const double entropy_part = p > 0 ? p * row.grad_entropy * (logp + row.entropy) : 0.0;
    double g = -p * row.grad_logprob - entropy_part;
    if (i == row.target) g += row.grad_logprob;
    out[i] = g * row.inv_temperature;
  }
}

}  // namespace

RowStats row_stats(const void* logits, Element dtype, int64_t n, double inv_temperature, bool with_sum_z) {
  if (dtype == Element::kDouble) return stats_double(static_cast<const double*>(logits), n, inv_temperature);
  if (dtype == Element::kBFloat16) {
    const auto* x = static_cast<const uint16_t*>(logits);
    return with_sum_z ? stats<true>(x, n, inv_temperature) : stats<false>(x, n, inv_temperature);
  }
  const auto* x = static_cast<const float*>(logits);
  return with_sum_z ? stats<true>(x, n, inv_temperature) : stats<false>(x, n, inv_temperature);
}

void row_grad(const RowGrad& row, Element dtype) {
  const int64_t width = dtype == Element::kDouble ? 8 : dtype == Element::kFloat ? 4 : 2;
  char* out = static_cast<char*>(row.out);
  if (row.grad_logprob == 0 && row.grad_entropy == 0) {  // a masked token: exact zeros, whatever the logits hold
    memset(out, 0, static_cast<size_t>(row.num_columns * width));
    return;
  }
  if (dtype == Element::kDouble) grad_double(row);
  else if (dtype == Element::kBFloat16) grad<uint16_t>(row);
  else grad<float>(row);
  memset(out + row.num_valid * width, 0, static_cast<size_t>((row.num_columns - row.num_valid) * width));
}

}  // namespace grpo_mc::GRPO_MC_ISA
