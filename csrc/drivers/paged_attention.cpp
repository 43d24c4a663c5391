// paged_attention: checks, and on the CPU one kernel call per (row, key-value head).
//
// Tables and lengths on a GPU are not read here, which would wait for the device: a row of whose blocks one does not exist,
// or whose length its table cannot hold, becomes NaN.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "cpu/kernels.h"
#include "drivers/checks.h"
#include "drivers/device.h"
#include "drivers/parallel.h"

namespace grpo_mc {
namespace {

using at::Tensor;

void check_shapes(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& tables, const Tensor& lengths) {
  const char* op = "paged_attention";
  TORCH_CHECK_VALUE(query.dim() == 3, op, ": query has shape ", query.sizes(), "; it must be [B, Hq, D]");
  TORCH_CHECK_VALUE(keys.dim() == 4 && keys.sizes() == values.sizes(), op, ": key_cache has shape ", keys.sizes(),
                    " and value_cache ", values.sizes(), "; both must be [N, block, Hkv, D]");
  TORCH_CHECK_VALUE(keys.scalar_type() == values.scalar_type(), op, ": key_cache is ", keys.scalar_type(),
                    " but value_cache is ", values.scalar_type(), "; they must have one dtype");
  TORCH_CHECK_VALUE(keys.size(3) == query.size(2) && keys.size(2) > 0 && query.size(1) % keys.size(2) == 0, op, ": query is ",
                    query.sizes(), " but the cache is ", keys.sizes(), "; D must be equal and Hq a multiple of Hkv");
  TORCH_CHECK_VALUE(keys.size(1) > 0, op, ": the cache has blocks of 0 tokens");
  TORCH_CHECK_VALUE(keys.stride(3) == 1 && values.stride(3) == 1, op, ": the D values of a cache entry must be adjacent in memory");
  TORCH_CHECK_VALUE(tables.dim() == 2 && tables.size(0) == query.size(0) && tables.scalar_type() == at::kInt, op,
                    ": block_tables is ", tables.scalar_type(), tables.sizes(), "; it must be Int[", query.size(0), ", M]");
  check_vector(op, "lengths", lengths, query.size(0), at::kInt);
}

// Every block a row will read must exist: a wrong table is an error here, never a read outside the cache.
void check_tables(const Tensor& tables, const Tensor& lengths, int64_t num_blocks, int64_t block_size) {
  const int32_t* length = lengths.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    const int64_t used = (static_cast<int64_t>(length[b]) + block_size - 1) / block_size;
    TORCH_CHECK_VALUE(length[b] >= 0 && used <= tables.size(1), "paged_attention: lengths[", b, "] is ", length[b],
                      "; it must lie in [0, ", tables.size(1) * block_size, "], what the block table can hold");
    const int32_t* table = tables.const_data_ptr<int32_t>() + b * tables.size(1);
    for (int64_t i = 0; i < used; ++i) {
      TORCH_CHECK_VALUE(table[i] >= 0 && table[i] < num_blocks, "paged_attention: block_tables[", b, ", ", i, "] is ", table[i],
                        "; the cache has blocks 0 to ", num_blocks - 1);
    }
  }
}

// Whether every cached row begins at a multiple of sixteen bytes.
bool is_aligned(const Tensor& cache) {
  const int64_t entries = 16 / cache.element_size();
  bool all = reinterpret_cast<uintptr_t>(cache.const_data_ptr()) % 16 == 0;
  for (int64_t dim = 0; dim < 3; ++dim) all = all && (cache.stride(dim) % entries == 0 || cache.size(dim) <= 1);
  return all;
}

Tensor on_cuda(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& tables, const Tensor& lengths, double scale) {
  const Tensor rows = query.contiguous();
  Tensor out = at::empty(query.sizes(), query.options().memory_format(at::MemoryFormat::Contiguous));
  if (out.numel() == 0) return out;
  PagedCall p{};
  p.rows = query.size(0);
  p.heads = query.size(1);
  p.head_dim = query.size(2);
  p.blocks = keys.size(0);
  p.block_size = keys.size(1);
  p.kv_heads = keys.size(2);
  p.table_width = tables.size(1);
  p.num_parts = (p.table_width * p.block_size + kPagedPart - 1) / kPagedPart;
  const Tensor parts = at::empty({p.rows, p.heads, p.num_parts, p.head_dim + 2}, query.options().dtype(at::kFloat));
  p.query = rows.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.keys = keys.const_data_ptr();
  p.values = values.const_data_ptr();
  p.tables = p.num_parts > 0 ? tables.const_data_ptr<int32_t>() : nullptr;
  p.lengths = lengths.const_data_ptr<int32_t>();
  p.parts = p.num_parts > 0 ? parts.mutable_data_ptr<float>() : nullptr;
  p.key_block_stride = keys.stride(0);
  p.key_slot_stride = keys.stride(1);
  p.key_head_stride = keys.stride(2);
  p.value_block_stride = values.stride(0);
  p.value_slot_stride = values.stride(1);
  p.value_head_stride = values.stride(2);
  p.scale = scale;
  p.query_dtype = element_of("paged_attention", "query", query, /*allow_double=*/false);
  p.cache_dtype = element_of("paged_attention", "key_cache", keys, /*allow_double=*/false);
  p.is_aligned = is_aligned(keys) && is_aligned(values);
  launch("paged_attention", &CudaKernels::paged_attention, p, query);
  return out;
}

Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
                       const Tensor& lengths, double scale) {
  check_shapes(query, key_cache, value_cache, block_tables, lengths);
  check_finite("paged_attention", "scale", scale);
  element_of("paged_attention", "query", query, /*allow_double=*/false);
  const Element cache = element_of("paged_attention", "key_cache", key_cache, /*allow_double=*/false);
  const Tensor tables = block_tables.contiguous(), used = lengths.contiguous();
  if (runs_on_cuda(query)) return on_cuda(query, key_cache, value_cache, tables, used, scale);
  check_tables(tables, used, key_cache.size(0), key_cache.size(1));

  const int64_t rows = query.size(0), heads = key_cache.size(2), head_dim = query.size(2);
  const int64_t group = query.size(1) / heads;
  const Tensor scaled = query.to(at::kFloat).mul(scale).contiguous();
  Tensor out = at::empty(query.sizes(), query.options().dtype(at::kFloat).memory_format(at::MemoryFormat::Contiguous));
  const float* query_data = scaled.const_data_ptr<float>();
  float* out_data = out.mutable_data_ptr<float>();
  const char* keys = static_cast<const char*>(key_cache.const_data_ptr());
  const char* values = static_cast<const char*>(value_cache.const_data_ptr());
  const int64_t width = key_cache.element_size();

  parallel_for(rows * heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(static_cast<size_t>(paged_scratch_floats(group)));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / heads, head = item % heads;
      PagedHead h{};
      h.query = query_data + item * group * head_dim;
      h.out = out_data + item * group * head_dim;
      h.keys = keys + head * key_cache.stride(2) * width;
      h.values = values + head * value_cache.stride(2) * width;
      h.blocks = tables.const_data_ptr<int32_t>() + row * tables.size(1);
      h.key_block_stride = key_cache.stride(0);
      h.key_slot_stride = key_cache.stride(1);
      h.value_block_stride = value_cache.stride(0);
      h.value_slot_stride = value_cache.stride(1);
      h.length = used.const_data_ptr<int32_t>()[row];
      h.block_size = key_cache.size(1);
      h.group = group;
      h.head_dim = head_dim;
      h.scratch = scratch.data();
      GRPO_MC_KERNEL(paged_attention_head)(h, cache);
    }
  });
  return out.to(query.scalar_type());
}

}  // namespace

GRPO_MC_OPERATORS(m) { m.impl("paged_attention", paged_attention); }

}  // namespace grpo_mc
