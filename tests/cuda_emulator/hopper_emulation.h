// The wrappers of csrc/cuda/hopper.h on the CPU. Part of cuda_runtime.h.
//
// Boxes: the address arithmetic of both sides is the hardware's: load_box swizzles by the bits of the shared address,
// and a matrix instruction finds every byte by its descriptor, so a wrong descriptor, stride or swizzle gives wrong
// numbers. Asynchrony: with the thread order `descending`, copies are made as late as a right kernel allows (when
// somebody waits for them), with others at once: a missing wait shows in the one, a stage filled while it is still read
// in the other. Matrix instructions read shared memory when the warpgroup waits for them.
#pragma once

#include <array>

namespace emulator {

// Runs `work` at once or, with late copies, when a thread waits at this barrier in vain.
void later(const void* barrier, std::function<void()> work);
void make_late_copies(const void* barrier);
void arrive_at_barrier(int number, int count);
[[noreturn]] void fail(const char* what);

// The matrix instructions that this thread has started.
std::vector<std::function<void()>>& products_under_way();

struct Barrier {  // what the 8 bytes of an mbarrier hold
  std::uint32_t phase : 1, expected : 15, pending : 16;
  std::int32_t bytes;
};
static_assert(sizeof(Barrier) == 8);

inline Barrier* barrier_at(std::uint64_t* address) { return reinterpret_cast<Barrier*>(address); }

inline void end_phase_if_complete(Barrier* barrier) {
  if (barrier->pending != 0 || barrier->bytes != 0) return;
  barrier->phase ^= 1;
  barrier->pending = barrier->expected;
}

inline const std::array<float, 256>& e4m3_numbers() {
  static const std::array<float, 256> numbers = [] {
    std::array<float, 256> table{};
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      float number = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9) : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
      if ((code & 0x7f) == 0x7f) number = std::nanf("");
      table[static_cast<std::size_t>(code)] = (code & 0x80) != 0 ? -number : number;
    }
    return table;
  }();
  return numbers;
}

}  // namespace emulator

namespace grpo_mc::cuda {

struct TensorMap {
  const unsigned char* base;
  std::int64_t sizes[3], strides[2];
  int rows;
};

inline const char* describe_boxes(TensorMap* map, const void* base, const std::int64_t (&sizes)[3], const std::int64_t (&strides)[2], int rows) {
  bool right = reinterpret_cast<std::uintptr_t>(base) % 16 == 0 && rows >= 1 && rows <= 256;
  for (const std::int64_t size : sizes) right &= size >= 1 && size <= std::int64_t{1} << 32;
  for (const std::int64_t stride : strides) right &= stride > 0 && stride % 16 == 0 && stride < std::int64_t{1} << 40;
  if (!right) return "the driver refused the description of an operand's boxes";
  *map = {static_cast<const unsigned char*>(base), {sizes[0], sizes[1], sizes[2]}, {strides[0], strides[1]}, rows};
  return nullptr;
}

// Not 0, so that an address and an offset are not the same.
inline unsigned shared_address(const void* p) { return static_cast<unsigned>(static_cast<const unsigned char*>(p) - emulator::shared_memory()) + 1024; }
inline unsigned char* at_shared_address(unsigned address) { return emulator::shared_memory() + address - 1024; }
inline unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

inline void init_barrier(std::uint64_t* barrier, int count) { *emulator::barrier_at(barrier) = {0, static_cast<unsigned>(count), static_cast<unsigned>(count), 0}; }
inline void publish_barriers() {}

inline void arrive_announcing(std::uint64_t* address, int bytes) {
  emulator::Barrier* barrier = emulator::barrier_at(address);
  if (barrier->pending == 0) emulator::fail("more threads arrive at a barrier than it counts");
  barrier->bytes += bytes;
  --barrier->pending;
  emulator::end_phase_if_complete(barrier);
}
inline void arrive(std::uint64_t* barrier) { arrive_announcing(barrier, 0); }

inline void arrive_when_copied(std::uint64_t* barrier) {
  auto copies = std::move(emulator::copies_under_way());
  emulator::copies_under_way().clear();
  emulator::later(barrier, [copies, barrier] {
    for (const auto& group : copies) emulator::complete(group);
    arrive(barrier);
  });
}

inline void wait_for(std::uint64_t* address, unsigned parity) {
  while (emulator::barrier_at(address)->phase == parity) {
    emulator::make_late_copies(address);
    if (emulator::barrier_at(address)->phase == parity) emulator::yield_thread();
  }
}

inline void load_box(void* shared, const TensorMap* map, std::uint64_t* barrier, int x, int y, int z) {
  const unsigned to = shared_address(shared);
  if (to % 1024 != 0) emulator::fail("a box goes to an address that is no multiple of 1024");
  emulator::later(barrier, [to, from = *map, barrier, x, y, z] {  // the thread may be gone by then, and its parameters
    for (int row = 0; row < from.rows; ++row)
      for (int i = 0; i < 128; ++i) {
        const bool inside = x + i < from.sizes[0] && y + row < from.sizes[1] && z < from.sizes[2];
        *at_shared_address(swizzled(to + static_cast<unsigned>(row * 128 + i))) =
            inside ? from.base[z * from.strides[1] + (y + row) * from.strides[0] + x + i] : 0;
      }
    emulator::barrier_at(barrier)->bytes -= from.rows * 128;
    emulator::end_phase_if_complete(emulator::barrier_at(barrier));
  });
}

inline void copy_float(float* shared, const float* global, bool present) {
  auto& groups = emulator::copies_under_way();
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({reinterpret_cast<unsigned char*>(shared), reinterpret_cast<const unsigned char*>(global), present ? 4 : 0, 4});
}

inline void wait_at(int number, int count) { emulator::wait_at_barrier(number, count); }
inline void arrive_at(int number, int count) { emulator::arrive_at_barrier(number, count); }
template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}

// Byte k of row `row` of the matrix that a descriptor names: K-major, swizzled by 128 bytes.
inline float entry(std::uint64_t descriptor, int row, int k) {
  const unsigned start = static_cast<unsigned>(descriptor & 0x3fff) << 4, next_8_rows = static_cast<unsigned>(descriptor >> 32 & 0x3fff) << 4;
  const unsigned address = start + static_cast<unsigned>(row / 8) * next_8_rows + static_cast<unsigned>(row % 8 * 128 + k);
  return emulator::e4m3_numbers()[*at_shared_address(swizzled(address))];
}

template <int kColumns>
void start_product(float (&sums)[kColumns / 2], std::uint64_t a, std::uint64_t b, bool add) {
  if (a >> 62 != 1 || b >> 62 != 1 || (a >> 49 & 7) != 0 || (b >> 49 & 7) != 0) emulator::fail("a matrix descriptor names another layout");
  const int thread = static_cast<int>(threadIdx.x % 128), row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  float* out = sums;
  emulator::products_under_way().push_back([=] {
    float left[2][32];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 32; ++k) left[half][k] = entry(a, row + half * 8, k);
    for (int j = 0; j < kColumns / 8; ++j)
      for (int odd = 0; odd < 2; ++odd) {
        float *upper = out + j * 4 + odd, *lower = upper + 2, parts[2] = {add ? *upper : 0.0f, add ? *lower : 0.0f};
        for (int k = 0; k < 32; ++k) {
          const float right = entry(b, j * 8 + column + odd, k);
          for (int half = 0; half < 2; ++half) parts[half] = std::fma(left[half][k], right, parts[half]);
        }
        *upper = parts[0];
        *lower = parts[1];
      }
  });
}

inline void begin_products() {}
inline void commit_products() {}

template <int kSums>
void finish_products(float (&)[kSums]) {
  emulator::yield_thread();  // others go on meanwhile: a stage that was released too early is filled before it is read
  for (const auto& product : emulator::products_under_way()) product();
  emulator::products_under_way().clear();
}

}  // namespace grpo_mc::cuda
