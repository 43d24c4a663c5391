// What sm_90a has beyond mma.h: copies of boxes by the tensor memory accelerator, barriers in shared memory that count
// threads and bytes, and matrix instructions of a warpgroup (128 threads) that read shared memory. The emulator of the
// tests has its own of the same names (tests/cuda_emulator/hopper_emulation.h).
#pragma once

#include "cuda/launch.h"

namespace grpo_mc::cuda {

constexpr int kWarpgroup = 128;
constexpr int kBoxBytes = 128;  // of a row of a box

// A matrix in shared memory as loaded by load_box: rows of 128 bytes from a multiple of 1024 bytes on, whose 16-byte
// chunks are swizzled over 8 rows (mode 1: 128 bytes). The next 8 rows are 1024 bytes on; 32 entries further along a
// row are 32 bytes on. Fields are in units of 16 bytes.
__device__ __forceinline__ uint64_t matrix_descriptor(unsigned shared_address) {
  constexpr uint64_t kNext8Rows = 1024 / 16, kSwizzle128 = 1;
  return (shared_address & 0x3ffffu) >> 4 | uint64_t{1} << 16 | kNext8Rows << 32 | kSwizzle128 << 62;
}

}  // namespace grpo_mc::cuda

#if !defined(GRPO_MC_EMULATED)

#include <cuda.h>

namespace grpo_mc::cuda {

using TensorMap = CUtensorMap;

// Describes bytes [sizes[2], sizes[1], sizes[0]] with strides[1] and strides[0] bytes between planes and rows, for
// boxes of kBoxBytes bytes of box_rows rows; bytes outside are read as zeros. base and the strides are multiples of 16.
// nullptr, or what is wrong. The driver's function is looked up at run time: this library links the runtime alone.
inline const char* describe_boxes(TensorMap* map, const void* base, const int64_t (&sizes)[3], const int64_t (&strides)[2], int box_rows) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
  }();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12 or later";
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(sizes[0]), static_cast<cuuint64_t>(sizes[1]), static_cast<cuuint64_t>(sizes[2])};
  const cuuint64_t stride[2] = {static_cast<cuuint64_t>(strides[0]), static_cast<cuuint64_t>(strides[1])};
  const cuuint32_t box[3] = {kBoxBytes, static_cast<cuuint32_t>(box_rows), 1}, steps[3] = {1, 1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(base), size, stride, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "the driver refused the description of an operand's boxes";
}

__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// A barrier whose phase ends when `count` threads have arrived and all bytes that they announced have been written.
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Shows initialised barriers to the copy engine; a block barrier shows them to other threads.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void arrive_announcing(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Arrives once the asynchronous copies (mma.h, copy_float) that this thread has started are written.
__device__ __forceinline__ void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Returns when the phase of this parity has ended; the phase before a barrier's first has parity 1 and has ended.
__device__ __forceinline__ void wait_for(uint64_t* barrier, unsigned parity) {
  unsigned ended;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                 : "=r"(ended)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (ended == 0);
}

// Starts copying the box at byte x of row y of plane z; its bytes count at the barrier, zeros from outside too.
__device__ __forceinline__ void load_box(void* shared, const TensorMap* map, uint64_t* barrier, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                   shared_address(shared)),
               "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
               : "memory");
}

// Starts copying a float, or writing a zero in its place.
__device__ __forceinline__ void copy_float(float* shared, const float* global, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(present ? 4 : 0) : "memory");
}

// Named barriers 1 to 15 of the block: `count` threads, of which some wait and others only arrive.
__device__ __forceinline__ void wait_at(int number, int count) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(count) : "memory"); }
__device__ __forceinline__ void arrive_at(int number, int count) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(count) : "memory"); }

// Every warp of a warpgroup gives registers back, or takes some that others have given back.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// sums [64, kColumns] = (`add`: +=) a [64, 32] times b [kColumns, 32] transposed, e4m3, by a whole warpgroup; sums may
// be read after finish_products. Thread 32 w + 4 g + t holds columns 8 j + 2 t, 8 j + 2 t + 1 of row 16 w + g as sums 4
// j and 4 j + 1, of row 16 w + g + 8 as the next two.
template <int kColumns>
__device__ __forceinline__ void start_product(float (&sums)[kColumns / 2], uint64_t a, uint64_t b, bool add) {
  static_assert(kColumns == 32 || kColumns == 128);
  if constexpr (kColumns == 32) {
    asm volatile(
        "{.reg .pred more; setp.ne.b32 more, %18, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, more, 1, 1;}"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
          "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  } else {
    asm volatile(
        "{.reg .pred more; setp.ne.b32 more, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, more, 1, 1;}"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
          "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
          "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
          "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
          "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),
          "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
          "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
          "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  }
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kSums>
__device__ __forceinline__ void finish_products(float (&sums)[kSums]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");  // no sum is read before
}

}  // namespace grpo_mc::cuda

#endif
