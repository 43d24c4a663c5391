// nvcc: sm_80 sm_90 sm_100
// Which row of which expert each choice goes to: a stable counting sort that depends on no thread's speed.
//
// The choices are cut into chunks. Every chunk's choices of every expert are counted (sums of whole numbers, so their
// order is free), the counts of an expert are summed over the chunks before, and one warp takes each chunk, 32 choices
// at a time in their order: lanes of one expert find each other and count the lanes below. The numbers are few, so
// latency bounds it: up to 32 chunks one block does all in one launch.
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kThreads = 256;       // of a block that counts or places
constexpr int kScanThreads = 1024;  // of the one block that sums, and of the one that does all

struct Chunks {
  int64_t count, size;
};

__device__ __forceinline__ bool is_expert(const MoePlan& p, int64_t id) { return id >= 0 && id < p.num_experts; }

// Counters of a chunk, by expert.
__device__ __forceinline__ int64_t* counters(const MoePlan& p, int64_t chunk) {
  return p.scratch + chunk * p.num_experts;
}

// Behind them: how many choices there are from the first on whose expert there is not.
__device__ __forceinline__ int64_t* bad_choices(const MoePlan& p, Chunks chunks) { return counters(p, chunks.count); }

__device__ __forceinline__ void add(int64_t* counter, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void count(const MoePlan& p, Chunks chunks, int64_t first, int64_t step) {
  for (int64_t i = first; i < p.choices; i += step) {
    const int64_t id = p.expert_ids[i];
    if (is_expert(p, id)) add(counters(p, i / chunks.size) + id, 1);
    else if (id != -1)
      atomicMax(reinterpret_cast<unsigned long long*>(bad_choices(p, chunks)),
                static_cast<unsigned long long>(p.choices - i));
  }
}

// Sum of the values of the threads before this one, and of all of them. `warps` is shared memory for 33 values.
__device__ __forceinline__ int64_t sum_before(int64_t value, int64_t* warps, int64_t* total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int64_t upto = value;
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t lower = __shfl_up_sync(kAllLanes, upto, static_cast<unsigned>(step));
    if (lane >= step) upto += lower;
  }
  if (lane == kWarp - 1) warps[warp] = upto;
  __syncthreads();
  int64_t before = 0, all = 0;
  for (int i = 0; i < static_cast<int>(blockDim.x) / kWarp; ++i) {
    if (i == warp) before = all;
    all += warps[i];
  }
  __syncthreads();
  *total = all;
  return before + upto - value;
}

// One block: counts become the choices in the chunks before, and the experts' offsets follow.
__device__ __forceinline__ void sum_chunks(const MoePlan& p, Chunks chunks) {
  __shared__ int64_t warps[kWarp];
  int64_t rows = 0;  // of the experts before
  for (int64_t first = 0; first < p.num_experts; first += blockDim.x) {
    const int64_t expert = first + threadIdx.x;
    int64_t chosen = 0;
    if (expert < p.num_experts) {
      for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
        int64_t* counter = counters(p, chunk) + expert;
        const int64_t here = *counter;
        *counter = chosen;
        chosen += here;
      }
    }
    const int64_t kept = p.capacity >= 0 && chosen > p.capacity ? p.capacity : chosen;
    int64_t total;
    const int64_t before = sum_before((kept + p.align - 1) / p.align * p.align, warps, &total);
    if (expert < p.num_experts) p.offsets[expert] = rows + before;
    rows += total;
  }
  if (threadIdx.x != 0) return;
  const int64_t bad = *bad_choices(p, chunks);
  if (bad > 0) p.offsets[0] = p.expert_ids[p.choices - bad];
  p.offsets[p.num_experts] = bad > 0 ? -1 : rows;
}

// One warp: the rows of a chunk's choices.
__device__ __forceinline__ void place(const MoePlan& p, Chunks chunks, int64_t chunk) {
  const int lane = threadIdx.x % kWarp;
  const int64_t end = min((chunk + 1) * chunks.size, p.choices);
  int64_t* counter = counters(p, chunk);
  const bool all_good = *bad_choices(p, chunks) == 0;
  for (int64_t first = chunk * chunks.size; first < end; first += kWarp) {
    const int64_t i = first + lane, id = i < end ? p.expert_ids[i] : -1;
    const bool chosen = all_good && is_expert(p, id);
    const unsigned same = __match_any_sync(kAllLanes, chosen ? static_cast<int>(id) : -1);
    const int64_t earlier = chosen ? counter[id] : 0;
    const int64_t rank = earlier + __popc(same & ((1u << lane) - 1u));
    __syncwarp();
    if (chosen && lane == __ffs(static_cast<int>(same)) - 1) counter[id] = earlier + __popc(same);
    __syncwarp();
    if (i < end) p.row_map[i] = chosen && (p.capacity < 0 || rank < p.capacity) ? p.offsets[id] + rank : -1;
  }
}

__global__ void __launch_bounds__(kThreads) count_choices(MoePlan p, Chunks chunks) {
  count(p, chunks, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
        static_cast<int64_t>(gridDim.x) * kThreads);
}

__global__ void __launch_bounds__(kScanThreads) sum_counts(MoePlan p, Chunks chunks) { sum_chunks(p, chunks); }

__global__ void __launch_bounds__(kThreads) place_choices(MoePlan p, Chunks chunks) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  for (int64_t chunk = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
       chunk < chunks.count; chunk += warps)
    place(p, chunks, chunk);
}

__global__ void __launch_bounds__(kScanThreads) plan_at_once(MoePlan p, Chunks chunks) {
  for (int64_t i = threadIdx.x; i <= chunks.count * p.num_experts; i += kScanThreads) p.scratch[i] = 0;
  __syncthreads();
  count(p, chunks, threadIdx.x, kScanThreads);
  __syncthreads();
  sum_chunks(p, chunks);
  __syncthreads();
  for (int64_t chunk = threadIdx.x / kWarp; chunk < chunks.count; chunk += kScanThreads / kWarp)
    place(p, chunks, chunk);
}

const char* zero(void* memory, int64_t bytes, void* stream) {
  const cudaError_t error = cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* moe_plan(const MoePlan& p, void* stream) {
  const int64_t count = moe_plan_chunks(p.choices, p.num_experts);
  const int64_t size = blocks_of(p.choices, count);
  const Chunks chunks{count, size < 1 ? 1 : size};
  if (count <= kScanThreads / kWarp) return launch(plan_at_once, 1, kScanThreads, 0, stream, p, chunks);
  const char* problem = zero(p.scratch, (count * p.num_experts + 1) * static_cast<int64_t>(sizeof(int64_t)), stream);
  constexpr int kWarps = kThreads / kWarp;
  if (problem == nullptr)
    problem = launch(count_choices, blocks_for(blocks_of(p.choices, kThreads)), kThreads, 0, stream, p, chunks);
  if (problem == nullptr) problem = launch(sum_counts, 1, kScanThreads, 0, stream, p, chunks);
  if (problem != nullptr) return problem;
  return launch(place_choices, blocks_for(blocks_of(count, kWarps)), kThreads, 0, stream, p, chunks);
}

}  // namespace grpo_mc::cuda
