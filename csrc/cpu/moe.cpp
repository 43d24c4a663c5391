// Moving tokens to their experts' rows and summing rows back to tokens.
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

constexpr int64_t kStreamBytes = 1024;  // shorter rows stay in the cache, where the expert's product wants them

template <typename T, typename Sum>
GRPO_MC_INLINE void combine_scalar(const MoeCombine& p, int64_t first) {
  const auto* rows = static_cast<const T*>(p.rows);
  const auto* probs = static_cast<const Sum*>(p.probs);
  auto* out = static_cast<T*>(p.out);
  for (int64_t h = first; h < p.width; ++h) {
    Sum sum = 0;
    for (int64_t j = 0; j < p.k; ++j) {
      if (p.map[j] < 0) continue;
      const T x = rows[p.map[j] * p.row_stride + h];
      Sum wide;
      if constexpr (sizeof(T) == 2) wide = bf16_to_float(x);
      else wide = x;
      sum += (probs == nullptr ? Sum{1} : probs[j]) * wide;
    }
    if constexpr (sizeof(T) == 2) out[h] = float_to_bf16(sum);
    else out[h] = sum;
  }
}

// Four vectors of columns at a time, so that each row is read in runs of cache lines.
template <typename T>
GRPO_MC_INLINE void combine_vectors(const MoeCombine& p) {
  constexpr int kVectors = 4;
  const auto* rows = static_cast<const T*>(p.rows);
  const auto* probs = static_cast<const float*>(p.probs);
  auto* out = static_cast<T*>(p.out);
  int64_t h = 0;
  for (; h + kVectors * kLanes <= p.width; h += kVectors * kLanes) {
    F8 sums[kVectors] = {};
    for (int64_t j = 0; j < p.k; ++j) {
      if (p.map[j] < 0) continue;
      const F8 prob = splat(probs == nullptr ? 1.0f : probs[j]);
      const T* row = rows + p.map[j] * p.row_stride + h;
      for (int i = 0; i < kVectors; ++i) sums[i] = sums[i] + prob * load8(row + i * kLanes);
    }
    for (int i = 0; i < kVectors; ++i) store8(out + h + i * kLanes, sums[i]);
  }
  combine_scalar<T, float>(p, h);
}

template <typename T>
GRPO_MC_INLINE double dot(const T* a, const T* b, int64_t width) {
  F8 sums[2] = {};
  int64_t h = 0;
  for (; h + 2 * kLanes <= width; h += 2 * kLanes)
    for (int i = 0; i < 2; ++i) sums[i] = fma8(load8(a + h + i * kLanes), load8(b + h + i * kLanes), sums[i]);
  for (; h < width; h += kLanes) {
    const int64_t left = width - h < kLanes ? width - h : kLanes;
    sums[0] = fma8(load_tail(a + h, left, 0.0f), load_tail(b + h, left, 0.0f), sums[0]);
  }
  return sum8(sums[0] + sums[1]);
}

}  // namespace

// Long rows go past the cache: they are written once and read later, and fetching the lines first would double the cost.
void moe_copy_row(const char* from, char* to, int64_t bytes) {
#if defined(__AVX2__)
  if (bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(to) % 32 == 0) {
    int64_t i = 0;
    for (; i + 32 <= bytes; i += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
    _mm_sfence();
    return;
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void moe_combine_token(const MoeCombine& p) {
  switch (p.dtype) {
    case Element::kFloat: return combine_vectors<float>(p);
    case Element::kBFloat16: return combine_vectors<uint16_t>(p);
    case Element::kDouble: return combine_scalar<double, double>(p, 0);
  }
}

double moe_dot_row(const void* a, const void* b, int64_t width, Element dtype) {
  if (dtype == Element::kFloat) return dot(static_cast<const float*>(a), static_cast<const float*>(b), width);
  if (dtype == Element::kBFloat16) return dot(static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b), width);
  const auto *x = static_cast<const double*>(a), *y = static_cast<const double*>(b);
  double sum = 0;
  for (int64_t h = 0; h < width; ++h) sum += x[h] * y[h];
  return sum;
}

}  // namespace grpo_mc::GRPO_MC_ISA
