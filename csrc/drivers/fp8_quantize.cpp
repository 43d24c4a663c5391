// quantize_fp8 and dequantize_fp8 on the CPU: checks, and one kernel call per band of tiles or per row.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "common/fp8.h"
#include "drivers/checks.h"
#include "cpu/kernels.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

int64_t tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

void check_tile(const char* op, int64_t tile_rows, int64_t tile_columns) {
  const bool rows_fit = tile_rows == 1 || tile_rows == kFp8Block, columns_fit = tile_columns == 1 || tile_columns == kFp8Block;
  TORCH_CHECK_VALUE(rows_fit && columns_fit && tile_rows * tile_columns > 1, op, ": tile is (", tile_rows, ", ", tile_columns,
                    "); it must be (1, 128), (128, 1) or (128, 128)");
}

std::tuple<Tensor, Tensor> quantize_fp8(const Tensor& x, int64_t tile_rows, int64_t tile_columns, bool power_of_two) {
  const char* op = "quantize_fp8";
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), "; it must be [M, K]");
  check_tile(op, tile_rows, tile_columns);
  // Halves are exact in float32, and rare on a CPU.
  const Tensor wide = x.scalar_type() == at::kHalf ? x.to(at::kFloat) : x;
  const Tensor rows = wide.stride(1) == 1 ? wide : wide.contiguous();
  Fp8Quantize p{};
  p.dtype = element_of(op, "x", rows, false);
  p.rows = x.size(0);
  p.columns = x.size(1);
  Tensor codes = at::empty({p.rows, p.columns}, x.options().dtype(at::kFloat8_e4m3fn).memory_format(at::MemoryFormat::Contiguous));
  Tensor scales = at::empty({tiles(p.rows, tile_rows), tiles(p.columns, tile_columns)}, x.options().dtype(at::kFloat).memory_format(at::MemoryFormat::Contiguous));
  p.x = rows.const_data_ptr();
  p.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  p.scales = scales.mutable_data_ptr<float>();
  p.x_stride = rows.stride(0);
  p.tile_rows = tile_rows;
  p.tile_columns = tile_columns;
  p.power_of_two = power_of_two;
  const int64_t grain = tile_rows == 1 ? std::max<int64_t>(1, 16384 / std::max<int64_t>(p.columns, 1)) : 1;
  parallel_for(tiles(p.rows, tile_rows), grain, [&](int64_t begin, int64_t end) {
    for (int64_t band = begin; band < end; ++band) GRPO_MC_KERNEL(fp8_quantize_band)(p, band);
  });
  return {codes, scales};
}

Tensor dequantize_fp8(const Tensor& codes, const Tensor& scales, int64_t tile_rows, int64_t tile_columns, at::ScalarType dtype) {
  const char* op = "dequantize_fp8";
  TORCH_CHECK_VALUE(codes.dim() == 2, op, ": q has shape ", codes.sizes(), "; it must be [M, K]");
  TORCH_CHECK_VALUE(codes.scalar_type() == at::kFloat8_e4m3fn, op, ": q has dtype ", codes.scalar_type(), "; it must be Float8_e4m3fn");
  TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat, op, ": scale has dtype ", scales.scalar_type(), "; it must be Float");
  check_tile(op, tile_rows, tile_columns);
  Fp8Dequantize p{};
  p.rows = codes.size(0);
  p.columns = codes.size(1);
  const int64_t scale_rows = tiles(p.rows, tile_rows), scale_columns = tiles(p.columns, tile_columns);
  TORCH_CHECK_VALUE(scales.dim() == 2 && scales.size(0) == scale_rows && scales.size(1) == scale_columns, op, ": scale has shape ",
                    scales.sizes(), "; for q ", codes.sizes(), " in tiles (", tile_rows, ", ", tile_columns, ") it must be [", scale_rows, ", ",
                    scale_columns, "]");
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, op, ": dtype is ", dtype, "; it must be Float or BFloat16");
  const Tensor rows = codes.stride(1) == 1 ? codes : codes.contiguous(), factors = scales.contiguous();
  Tensor out = at::empty({p.rows, p.columns}, codes.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
  p.codes = static_cast<const uint8_t*>(rows.const_data_ptr());
  p.scales = factors.const_data_ptr<float>();
  p.out = out.mutable_data_ptr();
  p.code_stride = rows.stride(0);
  p.tile_rows = tile_rows;
  p.tile_columns = tile_columns;
  p.dtype = element_of(op, "the result", out, false);
  parallel_for(p.rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(p.columns, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) GRPO_MC_KERNEL(fp8_dequantize_row)(p, row);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(grpo_mc, CPU, m) {
  m.impl("quantize_fp8", quantize_fp8);
  m.impl("dequantize_fp8", dequantize_fp8);
}

}  // namespace grpo_mc
