// The MoE operators: which row of which expert each token goes to, moving tokens there, summing rows back.
//
// On a GPU the drivers read no ids and no map, which would wait for the device; common/arguments.h says what the kernels
// make of those that are out of range.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"
#include "drivers/checks.h"
#include "drivers/device.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

constexpr int64_t kMost = 1 << 20;  // experts, and rows that an expert is filled up to
constexpr int64_t kGrainBytes = 1 << 17;  // of rows; less is not worth another thread

int64_t grain(int64_t bytes) { return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes)); }

// Rows in the order of experts, of one expert in the order of tokens and their choices.
std::tuple<Tensor, Tensor> moe_plan(const Tensor& expert_ids, int64_t num_experts, std::optional<int64_t> capacity, int64_t align) {
  const char* op = "moe_permute";
  TORCH_CHECK_VALUE(expert_ids.dim() == 2 && expert_ids.scalar_type() == at::kLong, op, ": expert_ids is ", expert_ids.scalar_type(), " ",
                    expert_ids.sizes(), "; it must be Long [T, K]");
  TORCH_CHECK_VALUE(num_experts >= 1 && num_experts <= kMost, op, ": num_experts is ", num_experts, "; it must be 1 to ", kMost);
  TORCH_CHECK_VALUE(!capacity || *capacity >= 0, op, ": capacity is ", capacity.value_or(0), "; it must be at least 0");
  TORCH_CHECK_VALUE(align >= 1 && align <= kMost, op, ": align is ", align, "; it must be 1 to ", kMost);
  const Tensor ids = expert_ids.contiguous();
  Tensor map = at::empty(ids.sizes(), ids.options().memory_format(at::MemoryFormat::Contiguous));
  Tensor offsets = at::empty({num_experts + 1}, ids.options().memory_format(at::MemoryFormat::Contiguous));
  if (runs_on_cuda(ids)) {
    const int64_t counters = moe_plan_chunks(ids.numel(), num_experts) * num_experts + 1;
    const Tensor scratch = at::empty({counters}, offsets.options());
    const MoePlan p{ids.const_data_ptr<int64_t>(), map.mutable_data_ptr<int64_t>(), offsets.mutable_data_ptr<int64_t>(),
                    scratch.mutable_data_ptr<int64_t>(), ids.numel(), num_experts, align, capacity.value_or(-1)};
    launch(op, &CudaKernels::moe_plan, p, ids);
    return {map, offsets};
  }
  const int64_t* expert = ids.const_data_ptr<int64_t>();
  const int64_t choices = ids.numel();
  std::vector<int64_t> counts(static_cast<size_t>(num_experts));
  for (int64_t i = 0; i < choices; ++i) {
    TORCH_CHECK_VALUE(expert[i] >= -1 && expert[i] < num_experts, op, ": expert_ids holds ", expert[i], "; it must hold -1 (none) to ",
                      num_experts - 1);
    if (expert[i] >= 0) ++counts[static_cast<size_t>(expert[i])];
  }
  int64_t *to = map.mutable_data_ptr<int64_t>(), *bound = offsets.mutable_data_ptr<int64_t>();
  std::vector<int64_t> next(static_cast<size_t>(num_experts)), last(static_cast<size_t>(num_experts));
  bound[0] = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    const int64_t kept = capacity ? std::min(counts[e], *capacity) : counts[e];
    next[e] = bound[e];
    last[e] = bound[e] + kept;
    bound[e + 1] = bound[e] + (kept + align - 1) / align * align;
  }
  for (int64_t i = 0; i < choices; ++i) {
    const auto e = static_cast<size_t>(std::max<int64_t>(expert[i], 0));
    to[i] = expert[i] >= 0 && next[e] < last[e] ? next[e]++ : -1;
  }
  return {map, offsets};
}

// Where each row comes from: the token's choice, as an index into row_map; -1 for rows of no token.
std::vector<int64_t> sources(const char* op, const Tensor& row_map, int64_t num_rows) {
  std::vector<int64_t> source(static_cast<size_t>(num_rows), -1);
  const int64_t* to = row_map.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < row_map.numel(); ++i) {
    if (to[i] == -1) continue;
    TORCH_CHECK_VALUE(to[i] >= 0 && to[i] < num_rows, op, ": row_map holds ", to[i], "; it must hold -1 or a row below ", num_rows);
    auto& place = source[static_cast<size_t>(to[i])];
    TORCH_CHECK_VALUE(place == -1, op, ": row_map holds row ", to[i], " twice");
    place = i;
  }
  return source;
}

void check_map(const char* op, const Tensor& row_map, const Tensor& probs) {
  TORCH_CHECK_VALUE(row_map.dim() == 2 && row_map.scalar_type() == at::kLong, op, ": row_map is ", row_map.scalar_type(), " ", row_map.sizes(),
                    "; it must be Long [T, K]");
  TORCH_CHECK_VALUE(probs.sizes() == row_map.sizes(), op, ": probs has shape ", probs.sizes(), "; it must be ", row_map.sizes());
}

void check_matrix(const char* op, const char* name, const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": ", name, " has shape ", x.sizes(), "; it must have 2 dimensions");
}

// rows [R, H] and row_probs [R]: each token's row at every place of its choices, zeros where no token goes.
void moe_permute_(Tensor& rows, Tensor& row_probs, const Tensor& x, const Tensor& probs, const Tensor& row_map) {
  const char* op = "moe_permute";
  check_matrix(op, "x", x);
  check_matrix(op, "out", rows);
  check_map(op, row_map, probs);
  TORCH_CHECK_VALUE(x.size(0) == row_map.size(0), op, ": x has ", x.size(0), " rows and expert_ids ", row_map.size(0), "; they must be the same");
  TORCH_CHECK_VALUE(rows.size(1) == x.size(1) && rows.scalar_type() == x.scalar_type() && rows.stride(1) == 1, op, ": out is ",
                    rows.scalar_type(), " ", rows.sizes(), "; it must be ", x.scalar_type(), " [R, ", x.size(1), "] with adjacent columns");
  check_no_overlap(op, "out", rows, {x, probs, row_map});
  TORCH_CHECK_VALUE(row_probs.scalar_type() == probs.scalar_type() && row_probs.is_contiguous() && row_probs.numel() == rows.size(0), op,
                    ": row_probs is ", row_probs.scalar_type(), " ", row_probs.sizes(), "; it must be ", probs.scalar_type(), " [",
                    rows.size(0), "], contiguous");
  const Tensor from = with_adjacent_columns(x), map = row_map.contiguous(), flat = probs.contiguous();
  const int64_t num_rows = rows.size(0), k = map.size(1), size = x.element_size(), bytes = x.size(1) * size;
  const int64_t prob_size = row_probs.element_size();
  if (runs_on_cuda(x)) {
    const Tensor source = at::empty({num_rows}, map.options().memory_format(at::MemoryFormat::Contiguous));
    const MoePermute p{from.const_data_ptr(), rows.mutable_data_ptr(), flat.const_data_ptr(), row_probs.mutable_data_ptr(),
                       map.const_data_ptr<int64_t>(), source.mutable_data_ptr<int64_t>(), map.size(0), k, num_rows, bytes,
                       from.stride(0) * size, rows.stride(0) * size, prob_size};
    return launch(op, &CudaKernels::moe_permute, p, x);
  }
  const std::vector<int64_t> source = sources(op, map, num_rows);
  const auto* read = static_cast<const char*>(from.const_data_ptr());
  auto* write = static_cast<char*>(rows.mutable_data_ptr());
  const int64_t from_stride = from.stride(0) * size, to_stride = rows.stride(0) * size;
  const int64_t* to = map.const_data_ptr<int64_t>();
  parallel_for(map.size(0), grain(k * bytes), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)  // the token is read once and written k times
      for (int64_t j = 0; j < k; ++j)
        if (to[t * k + j] >= 0) GRPO_MC_KERNEL(moe_copy_row)(read + t * from_stride, write + to[t * k + j] * to_stride, bytes);
  });
  const auto* prob = static_cast<const char*>(flat.const_data_ptr());
  auto* out_prob = static_cast<char*>(row_probs.mutable_data_ptr());
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t i = source[static_cast<size_t>(row)];
    if (i >= 0) std::copy(prob + i * prob_size, prob + (i + 1) * prob_size, out_prob + row * prob_size);
    else {
      std::fill(out_prob + row * prob_size, out_prob + (row + 1) * prob_size, char{0});
      std::fill(write + row * to_stride, write + row * to_stride + bytes, char{0});
    }
  }
}

void check_combine(const char* op, const Tensor& rows, const Tensor& row_map, const std::optional<Tensor>& probs) {
  check_matrix(op, "rows", rows);
  check_map(op, row_map, probs ? *probs : row_map);
  element_of(op, "rows", rows, true);
}

// Weights as the kernels want them: float, for rows of double double; undefined without.
Tensor weights_of(const std::optional<Tensor>& probs, const Tensor& rows) {
  return probs ? probs->to(rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).contiguous() : Tensor();
}

const void* weight_at(const Tensor& weights, int64_t i) {
  return weights.defined() ? static_cast<const char*>(weights.const_data_ptr()) + i * weights.element_size() : nullptr;
}

// out [T, H]: the sum of each token's rows, each times its prob.
void moe_unpermute_(Tensor& out, const Tensor& rows, const Tensor& row_map, const std::optional<Tensor>& probs) {
  const char* op = "moe_unpermute";
  check_combine(op, rows, row_map, probs);
  TORCH_CHECK_VALUE(out.dim() == 2 && out.size(0) == row_map.size(0) && out.size(1) == rows.size(1) && out.scalar_type() == rows.scalar_type() &&
                        out.stride(1) == 1,
                    op, ": out is ", out.scalar_type(), " ", out.sizes(), "; it must be ", rows.scalar_type(), " [", row_map.size(0), ", ",
                    rows.size(1), "] with adjacent columns");
  check_no_overlap(op, "out", out, {rows, row_map, probs.value_or(Tensor())});
  const Tensor from = with_adjacent_columns(rows), map = row_map.contiguous(), weights = weights_of(probs, rows);
  if (runs_on_cuda(rows)) {
    if (out.numel() == 0) return;
    const MoeUnpermute p{from.const_data_ptr(), map.const_data_ptr<int64_t>(), weight_at(weights, 0), out.mutable_data_ptr(), map.size(0),
                         map.size(1), rows.size(0), rows.size(1), from.stride(0), out.stride(0), element_of(op, "rows", rows, true)};
    return launch(op, &CudaKernels::moe_unpermute, p, rows);
  }
  sources(op, map, rows.size(0));
  const int64_t k = map.size(1), size = rows.element_size(), out_stride = out.stride(0) * size;
  MoeCombine p{};
  p.rows = from.const_data_ptr();
  p.row_stride = from.stride(0);
  p.k = k;
  p.width = rows.size(1);
  p.dtype = element_of(op, "rows", rows, true);
  auto* write = static_cast<char*>(out.mutable_data_ptr());
  const int64_t* to = map.const_data_ptr<int64_t>();
  parallel_for(map.size(0), grain(k * p.width * size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      MoeCombine token = p;
      token.map = to + t * k;
      token.probs = weight_at(weights, t * k);
      token.out = write + t * out_stride;
      GRPO_MC_KERNEL(moe_combine_token)(token);
    }
  });
}

// Gradients of moe_unpermute: of the rows [R, H], prob * grad_out of their token, and of the probs, row . grad_out.
std::tuple<Tensor, Tensor> moe_unpermute_backward(const Tensor& grad_out, const Tensor& rows, const Tensor& row_map, const Tensor& probs) {
  const char* op = "moe_unpermute_backward";
  check_combine(op, rows, row_map, probs);
  TORCH_CHECK_VALUE(grad_out.dim() == 2 && grad_out.size(0) == row_map.size(0) && grad_out.size(1) == rows.size(1) &&
                        grad_out.scalar_type() == rows.scalar_type(),
                    op, ": grad_out is ", grad_out.scalar_type(), " ", grad_out.sizes(), "; it must be ", rows.scalar_type(), " [",
                    row_map.size(0), ", ", rows.size(1), "]");
  const Tensor grad = with_adjacent_columns(grad_out), from = with_adjacent_columns(rows), map = row_map.contiguous();
  const Tensor weights = weights_of(probs, rows);
  const int64_t k = map.size(1), width = rows.size(1), size = rows.element_size();
  const Element dtype = element_of(op, "rows", rows, true);
  Tensor grad_rows = at::empty(rows.sizes(), rows.options().memory_format(at::MemoryFormat::Contiguous));
  Tensor grad_probs = at::zeros(probs.sizes(), probs.options().memory_format(at::MemoryFormat::Contiguous).dtype(at::kDouble));
  if (runs_on_cuda(rows)) {
    const Tensor source = at::empty({rows.size(0)}, map.options().memory_format(at::MemoryFormat::Contiguous));
    const MoeUnpermuteBackward p{grad.const_data_ptr(), from.const_data_ptr(), map.const_data_ptr<int64_t>(), weight_at(weights, 0),
                                 grad_rows.mutable_data_ptr(), grad_probs.mutable_data_ptr<double>(), source.mutable_data_ptr<int64_t>(),
                                 map.size(0), k, rows.size(0), width, grad.stride(0), from.stride(0), dtype};
    launch(op, &CudaKernels::moe_unpermute_backward, p, rows);
    return {grad_rows, grad_probs.to(probs.scalar_type())};
  }
  grad_rows.zero_();
  sources(op, map, rows.size(0));
  const auto* row = static_cast<const char*>(from.const_data_ptr());
  const auto* gradient = static_cast<const char*>(grad.const_data_ptr());
  auto* write = static_cast<char*>(grad_rows.mutable_data_ptr());
  auto* out_prob = grad_probs.mutable_data_ptr<double>();
  const int64_t* to = map.const_data_ptr<int64_t>();
  parallel_for(map.size(0), grain(2 * k * width * size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t j = 0; j < k; ++j) {
        const int64_t place = to[t * k + j], token = t;
        if (place < 0) continue;
        const MoeCombine scaled{gradient, &token, weight_at(weights, t * k + j), write + place * width * size, 1, width, grad.stride(0), dtype};
        GRPO_MC_KERNEL(moe_combine_token)(scaled);
        const char *a = row + place * from.stride(0) * size, *b = gradient + t * grad.stride(0) * size;
        out_prob[t * k + j] = GRPO_MC_KERNEL(moe_dot_row)(a, b, width, dtype);
      }
  });
  return {grad_rows, grad_probs.to(probs.scalar_type())};
}

std::tuple<Tensor, Tensor> moe_permute(const Tensor& x, const Tensor& probs, const Tensor& row_map, int64_t num_rows) {
  check_matrix("moe_permute", "x", x);
  Tensor rows = at::empty({num_rows, x.size(1)}, x.options().memory_format(at::MemoryFormat::Contiguous));
  Tensor row_probs = at::empty({num_rows}, probs.options().memory_format(at::MemoryFormat::Contiguous));
  moe_permute_(rows, row_probs, x, probs, row_map);
  return {rows, row_probs};
}

Tensor moe_unpermute(const Tensor& rows, const Tensor& row_map, const std::optional<Tensor>& probs) {
  check_combine("moe_unpermute", rows, row_map, probs);
  Tensor out = at::empty({row_map.size(0), rows.size(1)}, rows.options().memory_format(at::MemoryFormat::Contiguous));
  moe_unpermute_(out, rows, row_map, probs);
  return out;
}

}  // namespace

GRPO_MC_OPERATORS(m) {
  m.impl("moe_plan", moe_plan);
  m.impl("moe_permute_", moe_permute_);
  m.impl("moe_unpermute_", moe_unpermute_);
  m.impl("moe_permute", moe_permute);
  m.impl("moe_unpermute", moe_unpermute);
  m.impl("moe_unpermute_backward", moe_unpermute_backward);
}

}  // namespace grpo_mc
