// fp8_gemm, fp8_grouped_gemm and fp8_grouped_wgrad: checks; on the CPU the products of one call are spread over threads.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "common/fp8.h"
#include "cpu/kernels.h"
#include "drivers/checks.h"
#include "drivers/device.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

// The rows and columns of a task. Tall ones decode b seldom: 86 panels, of which 4 bytes * 516 * 128 of each block of the
// depth stay in the cache. Where the depth is short, writing the result counts: wide ones go along its rows.
struct TaskShape {
  int64_t rows, columns;
};
constexpr TaskShape kTall{516, kFp8StripColumns}, kWide{126, 8 * kFp8StripColumns};
constexpr int64_t kShortDepth = 4 * kFp8Block;
constexpr int64_t kWaveFloats = 4096 * 1024;  // 16 MB of decoded rows at once, where one chunk does not need more

const uint8_t* codes_of(const Tensor& x) { return static_cast<const uint8_t*>(x.const_data_ptr()); }

void check_codes(const char* op, const char* name, const Tensor& x, int64_t dims) {
  TORCH_CHECK_VALUE(x.dim() == dims, op, ": ", name, " has shape ", x.sizes(), "; it must have ", dims, " dimensions");
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat8_e4m3fn, op, ": ", name, " has dtype ", x.scalar_type(), "; it must be Float8_e4m3fn");
}

void check_scale(const char* op, const char* name, const Tensor& scale, at::IntArrayRef shape, at::IntArrayRef other) {
  TORCH_CHECK_VALUE(scale.scalar_type() == at::kFloat, op, ": ", name, " has dtype ", scale.scalar_type(), "; it must be Float");
  TORCH_CHECK_VALUE(scale.sizes() == shape || scale.sizes() == other, op, ": ", name, " has shape ", scale.sizes(), "; it must be ", shape,
                    shape == other ? "" : " or, in tiles of 1 x 128, ", shape == other ? "" : c10::str(other));
}

int64_t divide_up(int64_t size, int64_t part) { return (size + part - 1) / part; }

// Some rows of one product: first their rows of a are decoded, then come the groups of columns.
struct Chunk {
  Fp8Gemm p;
  bool few;  // rows decoded as they are, not in panels
  float* packed;
  int64_t first_pack, first_group;  // the first of its tasks in the wave

  int64_t packs() const { return few ? p.rows : divide_up(p.rows, kFp8PanelRows); }
  int64_t groups() const { return divide_up(p.columns, p.group_columns); }
  int64_t width() const { return fp8_blocks(p.depth) * kFp8Block; }
  int64_t floats() const { return width() * (few ? p.rows : packs() * kFp8PanelRows); }

  void pack(int64_t at) const {
    if (few) GRPO_MC_KERNEL(fp8_decode_row)(p, at, packed + at * width());
    else GRPO_MC_KERNEL(fp8_pack_panel)(p, at, packed);
  }
  void multiply(int64_t group, float* scratch) const {
    if (few) GRPO_MC_KERNEL(fp8_few_rows_group)(p, packed, group);
    else GRPO_MC_KERNEL(fp8_gemm_group)(p, packed, group, scratch);
  }
};

// The chunks of products of any sizes. Which path a row takes depends on its own product only.
std::vector<Chunk> chunks_of(const std::vector<Fp8Gemm>& products) {
  std::vector<Chunk> chunks;
  for (const Fp8Gemm& p : products) {
    if (p.columns == 0 || (p.accumulate && p.depth == 0)) continue;
    const bool few = p.rows <= kFp8FewRows && !p.b.by_depth;
    const TaskShape task = p.depth > kShortDepth || few ? kTall : kWide;
    const int64_t out_bytes = p.dtype == Element::kFloat ? 4 : 2;
    for (int64_t first = 0; first < p.rows; first += task.rows) {
      Fp8Gemm part = p;
      part.rows = std::min(task.rows, p.rows - first);
      part.group_columns = task.columns;
      part.a.codes += first * (p.a.by_depth ? 1 : p.a.stride);
      part.a.scale += first * p.a.scale_stride;
      part.out = static_cast<char*>(p.out) + first * p.out_stride * out_bytes;
      chunks.push_back({part, few, nullptr, 0, 0});
    }
  }
  return chunks;
}

// Chunks [begin, end): two rounds of tasks, each over all of them, so that many small products keep every thread busy.
void run_wave(Chunk* begin, Chunk* end, float* packed) {
  int64_t packs = 0, groups = 0, scratch_floats = 0;
  for (Chunk* chunk = begin; chunk < end; ++chunk) {
    chunk->packed = packed;
    chunk->first_pack = packs;
    chunk->first_group = groups;
    packed += chunk->floats();
    packs += chunk->packs();
    groups += chunk->groups();
    if (!chunk->few) scratch_floats = std::max(scratch_floats, kFp8StripColumns * kFp8Block + chunk->p.group_columns * chunk->packs() * kFp8PanelRows);
  }
  parallel_tasks(packs, [&](const auto& next) {
    const Chunk* chunk = begin;
    for (int64_t task; (task = next()) < packs;) {
      while (task >= chunk->first_pack + chunk->packs()) ++chunk;  // a thread's tasks rise
      chunk->pack(task - chunk->first_pack);
    }
  });
  parallel_tasks(groups, [&](const auto& next) {
    const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(scratch_floats)]);
    const Chunk* chunk = begin;
    for (int64_t task; (task = next()) < groups;) {
      while (task >= chunk->first_group + chunk->groups()) ++chunk;
      chunk->multiply(task - chunk->first_group, scratch.get());
    }
  });
}

// Products whose pointers, sizes and strides are set.
void multiply(const std::vector<Fp8Gemm>& products) {
  std::vector<Chunk> chunks = chunks_of(products);
  if (chunks.empty()) return;
  int64_t most = 0, all = 0;
  for (const Chunk& chunk : chunks) {
    most = std::max(most, chunk.floats());
    all += chunk.floats();
  }
  const int64_t capacity = std::min(std::max(most, kWaveFloats), all);
  const std::unique_ptr<float[]> packed(new float[static_cast<size_t>(capacity)]);
  for (size_t begin = 0; begin < chunks.size();) {
    size_t end = begin;
    for (int64_t floats = 0; end < chunks.size() && (floats += chunks[end].floats()) <= capacity;) ++end;
    run_wave(chunks.data() + begin, chunks.data() + end, packed.get());
    begin = end;
  }
}

void check_out(const char* op, const Tensor& out, at::IntArrayRef shape, std::initializer_list<Tensor> read) {
  TORCH_CHECK_VALUE(out.scalar_type() == at::kFloat || out.scalar_type() == at::kBFloat16, op, ": out_dtype is ", out.scalar_type(),
                    "; it must be Float or BFloat16");
  TORCH_CHECK_VALUE(out.sizes() == shape, op, ": accumulate_into is ", out.scalar_type(), " ", out.sizes(), "; it must be ", shape);
  TORCH_CHECK_VALUE(out.stride(-1) == 1 || out.size(-1) <= 1, op, ": accumulate_into has strides ", out.strides(),
                    "; its columns must be adjacent");
  check_no_overlap(op, "accumulate_into", out, read);
}

// The tensor, or a copy of it, with adjacent columns or (of its last two dims) adjacent rows.
Tensor with_adjacent_entries(const Tensor& x) { return x.stride(-1) == 1 || x.stride(-2) == 1 ? x : x.contiguous(); }

// The last two dims of codes and their scales.
Fp8Operand operand(const Tensor& codes, const Tensor& scale, bool square) {
  const bool by_depth = codes.stride(-1) != 1;
  return {codes_of(codes), scale.const_data_ptr<float>(), codes.stride(by_depth ? -1 : -2), scale.stride(-2), scale.stride(-1), by_depth, square};
}

Fp8Gemm problem(const Tensor& out, const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale, bool accumulate) {
  Fp8Gemm p{};
  p.a = operand(a, a_scale, false);
  p.b = operand(b, b_scale, b_scale.size(-2) != b.size(-2));
  p.out = out.mutable_data_ptr();
  p.rows = a.size(0);
  p.columns = b.size(-2);
  p.depth = a.size(1);
  p.out_stride = out.stride(-2);
  p.dtype = out.scalar_type() == at::kFloat ? Element::kFloat : Element::kBFloat16;
  p.accumulate = accumulate;
  return p;
}

// All products of one call on the device, with the memory that its kernels want for copies of operands.
void multiply_on_cuda(const char* op, Fp8Products p, const Tensor& out) {
  Tensor workspace;
  {
    const c10::OptionalDeviceGuard guard(out.is_cuda() ? std::optional<at::Device>(out.device()) : std::nullopt);
    workspace = at::empty({cuda_kernels(op).fp8_workspace(p)}, out.options().dtype(at::kByte));
  }
  p.workspace = static_cast<uint8_t*>(workspace.mutable_data_ptr());
  launch(op, &CudaKernels::fp8_products, p, out);
}

// Checks what fp8_gemm and fp8_grouped_gemm have in common; b has `b_dims` dimensions.
void check_operands(const char* op, const Tensor& out, const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale, int64_t b_dims) {
  check_codes(op, "a", a, 2);
  check_codes(op, "b", b, b_dims);
  TORCH_CHECK_VALUE(a.size(1) == b.size(-1), op, ": a is ", a.sizes(), " and b ", b.sizes(), "; they must be [M, K] and [",
                    b_dims == 3 ? "E, " : "", "N, K]");
  const int64_t columns = b.size(-2), depth_blocks = fp8_blocks(a.size(1));
  check_scale(op, "a_scale", a_scale, {a.size(0), depth_blocks}, {a.size(0), depth_blocks});
  std::vector<int64_t> wide = {fp8_blocks(columns), depth_blocks}, narrow = {columns, depth_blocks};
  if (b_dims == 3) {
    wide.insert(wide.begin(), b.size(0));
    narrow.insert(narrow.begin(), b.size(0));
  }
  check_scale(op, "b_scale", b_scale, wide, narrow);
  check_out(op, out, {a.size(0), columns}, {a, a_scale, b, b_scale});
}

void fp8_gemm_(Tensor& out, const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale, bool accumulate) {
  check_operands("fp8_gemm", out, a, a_scale, b, b_scale, 2);
  const Tensor left = with_adjacent_entries(a), right = with_adjacent_entries(b);
  const Fp8Gemm product = problem(out, left, a_scale, right, b_scale, accumulate);
  if (!runs_on_cuda(out)) return multiply({product});
  Fp8Products p{};
  p.product = product;
  p.experts = 1;
  multiply_on_cuda("fp8_gemm", p, out);
}

void fp8_grouped_gemm_(Tensor& out, const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale, const Tensor& offsets, bool accumulate) {
  const char* op = "fp8_grouped_gemm";
  check_operands(op, out, a, a_scale, b, b_scale, 3);
  const int64_t experts = b.size(0), rows = a.size(0);
  const Tensor bounds = check_offsets(op, offsets, experts, rows);
  const Tensor left = with_adjacent_entries(a), right = with_adjacent_entries(b);
  if (runs_on_cuda(out)) {
    Fp8Products p{};
    p.product = problem(out, left, a_scale, right, b_scale, accumulate);
    p.offsets = bounds.const_data_ptr<int64_t>();
    p.experts = experts;
    p.b_stride = right.stride(0);
    p.b_scale_stride = b_scale.stride(0);
    return multiply_on_cuda(op, p, out);
  }
  const int64_t* bound = bounds.const_data_ptr<int64_t>();
  if (!accumulate) {  // rows of no expert
    out.narrow(0, 0, bound[0]).zero_();
    out.narrow(0, bound[experts], rows - bound[experts]).zero_();
  }
  std::vector<Fp8Gemm> products;
  for (int64_t e = 0; e < experts; ++e) {
    const auto part = [&](const Tensor& x) { return x.narrow(0, bound[e], bound[e + 1] - bound[e]); };
    products.push_back(problem(part(out), part(left), part(a_scale), right.select(0, e), b_scale.select(0, e), accumulate));
  }
  multiply(products);
}

// A call on the device for every run of experts whose gradients lie at equal distances: as a rule, one.
void wgrad_on_cuda(const char* op, at::TensorList out, const Tensor& grad, const Tensor& grad_scale, const Tensor& x, const Tensor& x_scale,
                   const Tensor& bounds, bool accumulate) {
  const auto address = [&](size_t e) { return static_cast<char*>(out[e].mutable_data_ptr()); };
  for (size_t first = 0, last; first < out.size(); first = last) {
    const auto follows = [&](size_t e) {
      return out[e].scalar_type() == out[first].scalar_type() && out[e].stride(0) == out[first].stride(0) &&
             address(e) - address(e - 1) == address(first + 1) - address(first);
    };
    for (last = first + 1; last < out.size() && follows(last);) ++last;
    Fp8Products p{};
    p.product = problem(out[first], grad.t(), grad_scale.t(), x.t(), x_scale.t(), accumulate);
    p.offsets = bounds.const_data_ptr<int64_t>() + first;
    p.along_depth = true;
    p.first_expert = static_cast<int64_t>(first);
    p.experts = static_cast<int64_t>(last - first);
    p.out_stride_bytes = last > first + 1 ? address(first + 1) - address(first) : 0;
    multiply_on_cuda(op, p, out[first]);
  }
}

void fp8_grouped_wgrad_(at::TensorList out, const Tensor& grad, const Tensor& grad_scale, const Tensor& x, const Tensor& x_scale,
                        const Tensor& offsets, bool accumulate) {
  const char* op = "fp8_grouped_wgrad";
  check_codes(op, "grad", grad, 2);
  check_codes(op, "x", x, 2);
  const int64_t experts = static_cast<int64_t>(out.size()), rows = x.size(0);
  TORCH_CHECK_VALUE(grad.size(0) == rows, op, ": grad is ", grad.sizes(), " and x ", x.sizes(), "; they must be [M, N] and [M, K]");
  const Tensor bounds = check_offsets(op, offsets, experts, rows);
  const int64_t tiles = fp8_expert_tiles(rows, experts);
  check_scale(op, "grad_scale", grad_scale, {tiles, grad.size(1)}, {tiles, grad.size(1)});
  check_scale(op, "x_scale", x_scale, {tiles, x.size(1)}, {tiles, x.size(1)});
  for (size_t e = 0; e < out.size(); ++e) {
    check_out(op, out[e], {grad.size(1), x.size(1)}, {grad, grad_scale, x, x_scale});
    for (size_t other = 0; other < e; ++other) {
      const auto overlap = at::get_overlap_status(out[e], out[other]);
      TORCH_CHECK_VALUE(overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial, op, ": accumulate_into of expert ", e,
                        " shares memory with that of expert ", other, "; give it memory of its own");
    }
  }
  const Tensor left = with_adjacent_entries(grad), right = with_adjacent_entries(x);
  if (runs_on_cuda(x)) return wgrad_on_cuda(op, out, left, grad_scale, right, x_scale, bounds, accumulate);
  const int64_t* bound = bounds.const_data_ptr<int64_t>();
  std::vector<Fp8Gemm> products;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t count = bound[e + 1] - bound[e], first_tile = fp8_first_tile(bound[e], e);
    const auto codes = [&](const Tensor& from) { return from.narrow(0, bound[e], count).t(); };
    const auto scale = [&](const Tensor& from) { return from.narrow(0, first_tile, fp8_blocks(count)).t(); };
    products.push_back(problem(out[e], codes(left), scale(grad_scale), codes(right), scale(x_scale), accumulate));
  }
  multiply(products);
}

}  // namespace

GRPO_MC_OPERATORS(m) {
  m.impl("fp8_gemm_", fp8_gemm_);
  m.impl("fp8_grouped_gemm_", fp8_grouped_gemm_);
  m.impl("fp8_grouped_wgrad_", fp8_grouped_wgrad_);
}

}  // namespace grpo_mc
