// nvcc: sm_90a
// Products of FP8 matrices on Hopper's FP8 tensor cores. Persistent blocks of a producer warpgroup and one or two that
// multiply, around a ring of stages in shared memory: of each operand a box of 128 entries of the depth, and the
// scales.
//
// Numerics. The tensor core keeps some 14 bits of a sum while it adds products, so the four instructions of one block
// of the depth are all that it adds up: then the sums are taken out, scaled and added in float32 by one fma, as
// everywhere else. A block is then within about 2e-4 of its sum, whatever the depth (without taking out, errors grow
// with it); the 1e-6 of the portable kernel is not to be had from these instructions. Sums are in the order of the
// depth for every shape and tile, so that few rows and many agree.
//
// Bound: by the tensor cores where rows and columns are many (for a block of the depth, a tile of 128 x 128 reads 32 KB
// and multiplies for 512 clocks), by reading b once from memory where rows are few. While one warpgroup scales, the
// other multiplies: they take turns in issuing. Boxes need rows of 16-byte multiples whose entries are adjacent along
// the depth; other operands, and those of weight gradients, whose experts begin anywhere in the depth, are copied first
// (fp8_pack.cu).
//
// Every wait ends. All roles walk the same tiles and of each the same blocks (for_each_block), by arguments that do not
// change while the kernel runs. So to use n of a stage belong, at `full`, one announcing arrival, one arrival of each
// of the 32 lanes that copy scales, and as many bytes as announced (boxes count in full, whatever lies outside); at
// `empty`, one arrival of each multiplying warp. Use n waits for `empty` of use n - 1 of the stage, which needs `full`
// of it, and so on down to use 0, for which nobody waits. The turns: a warpgroup's wait n is met by one arrival of the
// other, of the first after its issue n, of the second after its issue n - 1, and for n = 0 before all; a last wait
// takes the arrival that is left over. What comes first in this order (copies, then the first's issue, then the
// second's) never waits for what comes later.
#include "common/fp8.h"
#include "cuda/fp8_pack.h"
#include "cuda/fp8_tiles.h"
#include "cuda/hopper.h"

namespace grpo_mc::cuda {
namespace {

// Tiles of 64 rows a multiplying warpgroup. kSquare: one scale of b serves a whole tile and block.
template <int kConsumers_, int kColumns_, int kStages_, bool kSquare_>
struct BoxShape {
  static constexpr int kConsumers = kConsumers_, kColumns = kColumns_, kStages = kStages_;
  static constexpr bool kSquare = kSquare_;
  static constexpr int kRows = 64 * kConsumers, kThreads = kWarpgroup * (kConsumers + 1), kSums = kColumns / 2;
  static constexpr int kBytesOfA = kRows * kBoxBytes, kBoxesBytes = kBytesOfA + kColumns * kBoxBytes;
  static constexpr int kScales = kRows + kColumns;
  static constexpr int kSharedBytes = kStages * (kBoxesBytes + kScales * 4 + 16);
  static_assert(kBytesOfA % 1024 == 0 && kBoxesBytes % 1024 == 0 && kFp8Block % kColumns == 0 && kSharedBytes <= 227 * 1024);
};

template <bool kSquare>
using FewRows = BoxShape<1, 32, 16, kSquare>;
template <bool kSquare>
using ManyRows = BoxShape<2, 128, 6, kSquare>;

// The ring of stages, from one role's point of view.
template <typename Shape>
struct Ring {
  int stage = 0;
  unsigned parity = 0;

  __device__ unsigned char* boxes() const { return dynamic_shared() + stage * Shape::kBoxesBytes; }
  __device__ float* scales() const {
    return reinterpret_cast<float*>(dynamic_shared() + Shape::kStages * Shape::kBoxesBytes) + stage * Shape::kScales;
  }
  __device__ static uint64_t* barriers() {
    return reinterpret_cast<uint64_t*>(dynamic_shared() + Shape::kStages * (Shape::kBoxesBytes + Shape::kScales * 4));
  }
  __device__ uint64_t* full() const { return barriers() + stage; }
  __device__ uint64_t* empty() const { return barriers() + Shape::kStages + stage; }

  __device__ void next() {
    if (++stage < Shape::kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// One tile of the walk that all roles share.
struct Tile {
  TileRows rows;
  int64_t column;
  Part part;
  int blocks;
};

template <typename Shape, typename Begin, typename Block, typename End>
__device__ __forceinline__ void for_each_block(const Fp8Products& g, int64_t slots, const Begin& begin, const Block& block, const End& end) {
  const int64_t across = (g.product.columns + Shape::kColumns - 1) / Shape::kColumns;
  for (int64_t index = blockIdx.x; index < slots * across; index += gridDim.x) {
    const TilePlace place = place_of(index, slots, across);
    const TileRows rows = find_rows(g, place.slot, Shape::kRows);
    if (rows.first >= rows.last) continue;
    const Part part = part_of(g, rows.expert);
    const Tile tile{rows, place.column * Shape::kColumns, part, static_cast<int>(fp8_blocks(part.depth))};
    begin(tile);
    for (int at = 0; at < tile.blocks; ++at) block(tile, at);
    end(tile);
  }
}

template <typename Shape>
__device__ void load_boxes(const TensorMap& a_map, const TensorMap& b_map, const Fp8Products& g, int64_t slots) {
  Ring<Shape> ring;
  const auto load = [&](const Tile& tile, int at) {
    if (threadIdx.x % kWarp == 0) {
      wait_for(ring.empty(), ring.parity ^ 1);
      arrive_announcing(ring.full(), Shape::kBoxesBytes);
      const int depth = static_cast<int>((tile.part.first_tile + at) * kFp8Block);
      load_box(ring.boxes(), &a_map, ring.full(), depth, static_cast<int>(tile.rows.first), 0);
      load_box(ring.boxes() + Shape::kBytesOfA, &b_map, ring.full(), depth, static_cast<int>(tile.column),
               g.along_depth ? 0 : static_cast<int>(tile.rows.expert));
    }
    ring.next();
  };
  for_each_block<Shape>(g, slots, [](const Tile&) {}, load, [](const Tile&) {});
}

// A warp's part of the scales of a stage. Rows outside have scale 0.
template <typename Shape>
__device__ void load_scales(const Fp8Products& g, int64_t slots) {
  Ring<Shape> ring;
  const Fp8Gemm& p = g.product;
  const int lane = threadIdx.x % kWarp;
  const auto load = [&](const Tile& tile, int at) {
    wait_for(ring.empty(), ring.parity ^ 1);
    const float* a_scale = tile.part.a_scale + at * p.a.scale_block_stride;
    const float* b_scale = tile.part.b_scale + at * p.b.scale_block_stride;
#pragma unroll
    for (int i = lane; i < Shape::kRows; i += kWarp) {
      const int64_t row = tile.rows.first + i;
      const bool present = row < tile.rows.last;
      copy_float(ring.scales() + i, present ? a_scale + row * p.a.scale_stride : a_scale, present);
    }
    float* to = ring.scales() + Shape::kRows;
    if constexpr (Shape::kSquare) {
      if (lane == 0) copy_float(to, b_scale + tile.column / kFp8Block * p.b.scale_stride, true);
    } else {
#pragma unroll
      for (int i = lane; i < Shape::kColumns; i += kWarp) {
        const bool present = tile.column + i < p.columns;
        copy_float(to + i, present ? b_scale + (tile.column + i) * p.b.scale_stride : b_scale, present);
      }
    }
    arrive_when_copied(ring.full());
    ring.next();
  };
  for_each_block<Shape>(g, slots, [](const Tile&) {}, load, [](const Tile&) {});
}

// sums += parts * (scale of a * scale of b); `upper` and `lower` are the scales of this thread's two rows.
template <typename Shape>
__device__ __forceinline__ void promote(const float (&parts)[Shape::kSums], float upper, float lower, const float* b_scales, float (&sums)[Shape::kSums]) {
  const float both = b_scales[0], upper_both = upper * both, lower_both = lower * both;
#pragma unroll
  for (int i = 0; i < Shape::kSums; ++i) {
    float scale = i % 4 < 2 ? upper_both : lower_both;
    if constexpr (!Shape::kSquare) scale = (i % 4 < 2 ? upper : lower) * b_scales[i / 4 * 2 + i % 2];
    sums[i] = fmaf(parts[i], scale, sums[i]);
  }
}

template <typename Shape>
__device__ void multiply(const Fp8Products& g, int64_t slots, int consumer) {
  constexpr bool kTurns = Shape::kConsumers == 2;
  constexpr int kOurTurn = 1, kTurnThreads = 2 * kWarpgroup;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
  const int row = consumer * 64 + thread / kWarp * 16 + lane / 4, column = lane % 4 * 2;
  Ring<Shape> ring;
  float sums[Shape::kSums], parts[Shape::kSums] = {};
  const auto begin = [&](const Tile&) {
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) sums[i] = 0.0f;
  };
  const auto block = [&](const Tile&, int) {
    wait_for(ring.full(), ring.parity);
    const uint64_t a = matrix_descriptor(shared_address(ring.boxes() + consumer * 64 * kBoxBytes));
    const uint64_t b = matrix_descriptor(shared_address(ring.boxes() + Shape::kBytesOfA));
    if constexpr (kTurns) wait_at(kOurTurn + consumer, kTurnThreads);
    begin_products();
#pragma unroll
    for (int k = 0; k < kFp8Block / 32; ++k) start_product<Shape::kColumns>(parts, a + k * 2, b + k * 2, k > 0);
    commit_products();
    if constexpr (kTurns) arrive_at(kOurTurn + (consumer ^ 1), kTurnThreads);
    const float upper = ring.scales()[row], lower = ring.scales()[row + 8];
    constexpr int kScalesOfB = Shape::kSquare ? 1 : Shape::kColumns / 4;
    float b_scales[kScalesOfB];
    if constexpr (Shape::kSquare) b_scales[0] = ring.scales()[Shape::kRows];
    else {
#pragma unroll
      for (int i = 0; i < kScalesOfB; ++i) b_scales[i] = ring.scales()[Shape::kRows + i / 2 * 8 + column + i % 2];
    }
    finish_products(parts);
    __syncwarp();  // every lane has read its scales
    if (lane == 0) arrive(ring.empty());
    ring.next();
    promote<Shape>(parts, upper, lower, b_scales, sums);
  };
  const auto end = [&](const Tile& tile) {
    if (tile.blocks == 0 && g.product.accumulate) return;  // -0 + 0 is not -0
    const bool pairs = writes_pairs(g.product, tile.part.out);
    const auto for_pairs = [&](const auto& use) {
#pragma unroll
      for (int i = 0; i < Shape::kSums; i += 2) {
        const int64_t to_row = tile.rows.first + row + i % 4 * 4, to_column = tile.column + i / 4 * 8 + column;
        if (to_row < tile.rows.last && to_column < g.product.columns) use(to_row, to_column, sums[i], sums[i + 1]);
      }
    };
    if (g.product.accumulate)
      for_pairs([&](int64_t r, int64_t c, float& x, float& y) { add_old_pair(g.product, tile.part.out, r, c, x, y, pairs); });
    for_pairs([&](int64_t r, int64_t c, float x, float y) { write_pair(g.product, tile.part.out, r, c, x, y, pairs); });
  };
  if (kTurns && consumer == 1) arrive_at(kOurTurn, kTurnThreads);  // the first turn is the first's
  for_each_block<Shape>(g, slots, begin, block, end);
  if (kTurns && consumer == 0) wait_at(kOurTurn, kTurnThreads);  // what the second gave after its last turn
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    multiply_boxes(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const __grid_constant__ Fp8Products g, int64_t slots) {
  if (threadIdx.x == 0) {
    if (shared_address(dynamic_shared()) % 1024 != 0) __trap();  // swizzles and descriptors count on it
    for (int i = 0; i < Shape::kStages; ++i) {
      init_barrier(Ring<Shape>::barriers() + i, 1 + kWarp);
      init_barrier(Ring<Shape>::barriers() + Shape::kStages + i, Shape::kConsumers * kWarpgroup / kWarp);
    }
    publish_barriers();
  }
  __syncthreads();
  const int group = threadIdx.x / kWarpgroup;
  if (group == Shape::kConsumers) {
    if constexpr (Shape::kConsumers == 2) give_registers<56>();
    const int warp = threadIdx.x % kWarpgroup / kWarp;
    if (warp == 0) load_boxes<Shape>(a_map, b_map, g, slots);
    if (warp == 1) load_scales<Shape>(g, slots);
  } else {
    if constexpr (Shape::kConsumers == 2) take_registers<224>();  // 56 + 2 x 224 = 3 x 168, which they start with
    multiply<Shape>(g, slots, group);
  }
}

template <typename Shape>
const char* run(const Fp8Products& g, const TensorMap& a_map, const TensorMap& b_map, void* stream) {
  const int64_t slots = row_slots(g, Shape::kRows), tiles = slots * ((g.product.columns + Shape::kColumns - 1) / Shape::kColumns);
  const int64_t blocks = tiles < multiprocessors() ? tiles : multiprocessors();
  return launch(multiply_boxes<Shape>, static_cast<unsigned>(blocks), Shape::kThreads, Shape::kSharedBytes, stream, a_map, b_map, g, slots);
}

template <template <bool> typename Shape>
const char* run_with_boxes(const Fp8Products& g, void* stream) {
  const Fp8Gemm& p = g.product;
  const BoxedOperand a = boxed_a(g), b = boxed_b(g);
  TensorMap a_map, b_map;
  const char* problem = describe_boxes(&a_map, a.codes, {a.width, p.rows, 1}, {a.stride, a.stride * p.rows}, Shape<true>::kRows);
  if (problem != nullptr) return problem;
  problem = describe_boxes(&b_map, b.codes, {b.width, p.columns, b.planes}, {b.stride, b.plane_stride}, Shape<true>::kColumns);
  if (problem != nullptr) return problem;
  return p.b.square ? run<Shape<true>>(g, a_map, b_map, stream) : run<Shape<false>>(g, a_map, b_map, stream);
}

}  // namespace

const char* fp8_on_hopper(const Fp8Products& g, void* stream) {
  const char* problem = fp8_pack(g, stream);
  if (problem != nullptr) return problem;
  const int64_t rows = g.along_depth ? g.product.rows : g.product.rows / g.experts;  // of an expert, if they are alike
  return rows <= 64 ? run_with_boxes<FewRows>(g, stream) : run_with_boxes<ManyRows>(g, stream);
}

}  // namespace grpo_mc::cuda
