// The wrappers of csrc/cuda/mma.h on the CPU. Part of cuda_runtime.h.
//
// mma: the 32 lanes bring their fragments, each computes its four sums. The layout is the PTX manual's; the products
// are exact there too, but the order and the rounding of the sums are the hardware's own: here they are fma, one after
// another. cp.async: bytes are read and written only when a wait completes their group, so a missing wait shows.
#pragma once

#include <immintrin.h>

#include <vector>

namespace emulator {

struct Copy {
  unsigned char* to;
  const unsigned char* from;
  int bytes, size;  // zeros from `bytes` to `size`
};

// The groups of copies of each thread of the block that are under way, oldest first; the last one is not ended yet.
std::vector<std::vector<Copy>>& copies_under_way();

inline void complete(const std::vector<Copy>& group) {
  for (const Copy& copy : group) {
    unsigned char bytes[16] = {};
    if (copy.bytes > 0) std::memcpy(bytes, copy.from, static_cast<std::size_t>(copy.bytes));
    std::memcpy(copy.to, bytes, static_cast<std::size_t>(copy.size));
  }
}

// Entry `index` of the fp16 pairs that a lane brought.
inline float half_of(const Brought& all, int lane, int index) {
  unsigned short bits;
  std::memcpy(&bits, all.of(lane) + 2 * index, sizeof(bits));
  return _cvtsh_ss(bits);
}

}  // namespace emulator

namespace grpo_mc::cuda {

inline void mma_16x8x16(float* sums, const unsigned* a, const unsigned* b) {
  const unsigned mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const emulator::Brought all = emulator::exchange(0xffffffffu, mine, sizeof(mine));
  const int group = emulator::lane() / 4, quarter = emulator::lane() % 4;
  for (int k = 0; k < 16; ++k) {
    const int holder = k % 8 / 2, pair = k / 8, odd = k % 2;  // of a column of a, of a row of b
    for (int i = 0; i < 4; ++i) {
      const float x = emulator::half_of(all, group * 4 + holder, (pair * 2 + i / 2) * 2 + odd);
      const float y = emulator::half_of(all, (quarter * 2 + i % 2) * 4 + holder, (4 + pair) * 2 + odd);
      sums[i] = std::fma(x, y, sums[i]);
    }
  }
}

inline void copy_async(void* shared, const void* global, int bytes) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(shared) % 16 == 0 && reinterpret_cast<std::uintptr_t>(global) % 16 == 0;
  if (!aligned || bytes < 0 || bytes > 16) {
    std::fprintf(stderr, "emulator: cp.async of %d bytes from %p to %p; both must be multiples of 16\n", bytes, global, shared);
    std::abort();
  }
  auto& groups = emulator::copies_under_way();
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({static_cast<unsigned char*>(shared), static_cast<const unsigned char*>(global), bytes, 16});
}

inline void commit_copies() {
  auto& groups = emulator::copies_under_way();
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

template <int kPending>
void wait_for_copies() {
  auto& groups = emulator::copies_under_way();
  while (groups.size() > kPending + 1) {
    emulator::complete(groups.front());
    groups.erase(groups.begin());
  }
}

}  // namespace grpo_mc::cuda
