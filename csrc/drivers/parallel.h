// parallel_for over torch's own thread pool.
//
// at::parallel_for is a header template that is serial unless this library is compiled with -fopenmp, and then it may
// run in another OpenMP runtime than torch's. torch_parallel_for is compiled inside libtorch, so
// torch.set_num_threads and OMP_NUM_THREADS reach it whatever our flags are.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace grpo_mc {

// Calls f(begin, end) on disjoint ranges covering [0, n). f must not throw and must treat each index on its own.
template <typename F>
void parallel_for(int64_t n, int64_t grain_size, const F& f) {
  if (n <= 0) return;
  const auto callback = [](int64_t begin, int64_t end, void* context) { (*static_cast<const F*>(context))(begin, end); };
  const auto error = torch_parallel_for(0, n, grain_size, callback, const_cast<void*>(static_cast<const void*>(&f)));
  TORCH_INTERNAL_ASSERT(error == 0, "torch_parallel_for failed");
}

// For tasks 0 to n - 1 of uneven cost: every thread runs f(next), and next() gives it a task that is its own, n or more
// when there are none left. f must not throw, and a task's result must not depend on which thread has it.
template <typename F>
void parallel_tasks(int64_t n, const F& f) {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  std::atomic<int64_t> tasks{0};
  const auto next = [&] { return tasks.fetch_add(1, std::memory_order_relaxed); };
  parallel_for(std::min<int64_t>(n, threads), 1, [&](int64_t, int64_t) { f(next); });
}

}  // namespace grpo_mc
