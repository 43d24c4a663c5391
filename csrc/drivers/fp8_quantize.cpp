// quantize_fp8 and dequantize_fp8: checks, and on the CPU one kernel call per band of tiles.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "common/fp8.h"
#include "cpu/kernels.h"
#include "drivers/checks.h"
#include "drivers/device.h"
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

// Rows that share tiles, and the row of the scales they have.
struct Band {
  int64_t first, rows, scale_row;
};

// All bands of a matrix; `offsets` [E + 1], adjacent: they start again at each expert's rows, and rows of no expert have none.
std::vector<Band> bands_of(int64_t rows, int64_t tile_rows, const Tensor& offsets) {
  std::vector<Band> bands;
  const auto cut = [&](int64_t begin, int64_t end, int64_t scale_row) {
    for (int64_t first = begin; first < end; first += tile_rows) bands.push_back({first, std::min(tile_rows, end - first), scale_row++});
  };
  if (!offsets.defined()) cut(0, rows, 0);
  else
    for (int64_t e = 0; e + 1 < offsets.size(0); ++e) {
      const int64_t* bound = offsets.const_data_ptr<int64_t>() + e;
      cut(bound[0], bound[1], fp8_first_tile(bound[0], e));
    }
  return bands;
}

// The checked offsets, or an undefined tensor.
Tensor expert_offsets(const char* op, const std::optional<Tensor>& offsets, int64_t rows, int64_t tile_rows, int64_t tile_columns) {
  if (!offsets.has_value()) return {};
  TORCH_CHECK_VALUE(tile_rows == kFp8Block && tile_columns == 1, op, ": offsets came with tile (", tile_rows, ", ", tile_columns,
                    "); they go with (128, 1), the tiles that lie along the rows");
  return check_offsets(op, *offsets, -1, rows);
}

std::tuple<int64_t, int64_t> scale_shape(int64_t rows, int64_t columns, int64_t tile_rows, int64_t tile_columns, const Tensor& offsets) {
  return {offsets.defined() ? fp8_expert_tiles(rows, offsets.size(0) - 1) : tiles(rows, tile_rows), tiles(columns, tile_columns)};
}

const int64_t* offsets_of(const Tensor& bounds) { return bounds.defined() ? bounds.const_data_ptr<int64_t>() : nullptr; }
int64_t experts_of(const Tensor& bounds) { return bounds.defined() ? bounds.size(0) - 1 : 0; }

// f(band) for each, several to a thread where they are small.
template <typename F>
void for_bands(const std::vector<Band>& bands, int64_t tile_rows, int64_t columns, const F& f) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(columns * tile_rows, 1));
  parallel_for(static_cast<int64_t>(bands.size()), grain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) f(bands[static_cast<size_t>(at)]);
  });
}

std::tuple<Tensor, Tensor> quantize_fp8(const Tensor& x, int64_t tile_rows, int64_t tile_columns, bool power_of_two, const std::optional<Tensor>& offsets) {
  const char* op = "quantize_fp8";
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), "; it must be [M, K]");
  check_tile(op, tile_rows, tile_columns);
  // Halves are exact in float32, and rare.
  const Tensor wide = x.scalar_type() == at::kHalf ? x.to(at::kFloat) : x;
  const Tensor rows = with_adjacent_columns(wide), bounds = expert_offsets(op, offsets, x.size(0), tile_rows, tile_columns);
  Fp8Quantize p{};
  p.dtype = element_of(op, "x", rows, false);
  p.columns = x.size(1);
  p.x_stride = rows.stride(0);
  p.tile_columns = tile_columns;
  p.power_of_two = power_of_two;
  const auto [scale_rows, scale_columns] = scale_shape(x.size(0), p.columns, tile_rows, tile_columns, bounds);
  const auto plain = [&](at::ScalarType dtype) { return x.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous); };
  Tensor codes = at::empty({x.size(0), p.columns}, plain(at::kFloat8_e4m3fn)), scales = at::empty({scale_rows, scale_columns}, plain(at::kFloat));
  if (runs_on_cuda(x)) {
    p.x = rows.const_data_ptr();
    p.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
    p.scales = scales.mutable_data_ptr<float>();
    p.rows = x.size(0);
    if (codes.numel() + scales.numel() > 0)
      launch(op, &CudaKernels::quantize_fp8, Fp8QuantizeTiles{p, tile_rows, offsets_of(bounds), experts_of(bounds)}, x);
    return {codes, scales};
  }
  const auto* numbers = static_cast<const char*>(rows.const_data_ptr());
  auto* to = static_cast<uint8_t*>(codes.mutable_data_ptr());
  auto* factors = scales.mutable_data_ptr<float>();
  if (bounds.defined()) {  // rows of no expert, and rows of the scales without a tile: as of zeros
    const int64_t first = bounds[0].item<int64_t>(), last = bounds[-1].item<int64_t>();
    std::fill(to, to + first * p.columns, uint8_t{0});
    std::fill(to + last * p.columns, to + codes.numel(), uint8_t{0});
    std::fill(factors, factors + scales.numel(), kLowestScale);
  }
  for_bands(bands_of(x.size(0), tile_rows, bounds), tile_rows, p.columns, [&](const Band& band) {
    Fp8Quantize part = p;
    part.x = numbers + band.first * p.x_stride * static_cast<int64_t>(rows.element_size());
    part.codes = to + band.first * p.columns;
    part.scales = factors + band.scale_row * scale_columns;
    part.rows = band.rows;
    GRPO_MC_KERNEL(fp8_quantize_band)(part);
  });
  return {codes, scales};
}

Tensor dequantize_fp8(const Tensor& codes, const Tensor& scales, int64_t tile_rows, int64_t tile_columns, at::ScalarType dtype,
                      const std::optional<Tensor>& offsets) {
  const char* op = "dequantize_fp8";
  TORCH_CHECK_VALUE(codes.dim() == 2, op, ": q has shape ", codes.sizes(), "; it must be [M, K]");
  TORCH_CHECK_VALUE(codes.scalar_type() == at::kFloat8_e4m3fn, op, ": q has dtype ", codes.scalar_type(), "; it must be Float8_e4m3fn");
  TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat, op, ": scale has dtype ", scales.scalar_type(), "; it must be Float");
  check_tile(op, tile_rows, tile_columns);
  const Tensor bounds = expert_offsets(op, offsets, codes.size(0), tile_rows, tile_columns);
  Fp8Dequantize p{};
  p.columns = codes.size(1);
  const auto [scale_rows, scale_columns] = scale_shape(codes.size(0), p.columns, tile_rows, tile_columns, bounds);
  TORCH_CHECK_VALUE(scales.dim() == 2 && scales.size(0) == scale_rows && scales.size(1) == scale_columns, op, ": scale has shape ",
                    scales.sizes(), "; for q ", codes.sizes(), " in tiles (", tile_rows, ", ", tile_columns, ") it must be [", scale_rows, ", ",
                    scale_columns, "]");
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, op, ": dtype is ", dtype, "; it must be Float or BFloat16");
  const Tensor rows = with_adjacent_columns(codes), factors = scales.contiguous();
  const auto options = codes.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous);
  Tensor out = at::empty(codes.sizes(), options);
  p.code_stride = rows.stride(0);
  p.tile_columns = tile_columns;
  p.dtype = element_of(op, "the result", out, false);
  if (runs_on_cuda(codes)) {
    p.codes = static_cast<const uint8_t*>(rows.const_data_ptr());
    p.scales = factors.const_data_ptr<float>();
    p.out = out.mutable_data_ptr();
    p.rows = codes.size(0);
    if (out.numel() > 0)
      launch(op, &CudaKernels::dequantize_fp8, Fp8DequantizeTiles{p, tile_rows, offsets_of(bounds), experts_of(bounds)}, codes);
    return out;
  }
  if (bounds.defined()) out.zero_();  // rows of no expert
  const auto* from = static_cast<const uint8_t*>(rows.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  for_bands(bands_of(codes.size(0), tile_rows, bounds), tile_rows, p.columns, [&](const Band& band) {
    Fp8Dequantize part = p;
    part.codes = from + band.first * p.code_stride;
    part.scales = factors.const_data_ptr<float>() + band.scale_row * scale_columns;
    part.out = to + band.first * p.columns * static_cast<int64_t>(out.element_size());
    part.rows = band.rows;
    GRPO_MC_KERNEL(fp8_dequantize_band)(part);
  });
  return out;
}

}  // namespace

GRPO_MC_OPERATORS(m) {
  m.impl("quantize_fp8", quantize_fp8);
  m.impl("dequantize_fp8", dequantize_fp8);
}

}  // namespace grpo_mc
