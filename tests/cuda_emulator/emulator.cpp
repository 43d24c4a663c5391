// The scheduler: one coroutine per thread of the block that runs, blocks in turn.
#include "cuda_runtime.h"

#include <setjmp.h>
#include <ucontext.h>

#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
namespace {

constexpr std::size_t kStackBytes = 128 * 1024;
constexpr long kMostIdleRounds = 200'000;  // rounds in which threads only spun
constexpr unsigned char kCanary = 0xA5;
constexpr std::size_t kCanaryBytes = 64;

enum class State { kReady, kSpinning, kAtBarrier, kInWarp, kDone };

struct Thread {
  State state = State::kReady;
  bool started = false;
  uint3 index{};
  int barrier = 0, barrier_count = 0;
  unsigned mask = 0;
  unsigned exchanges = 0;  // warp operations so far: which of the two slots is in use
  unsigned second = 0;     // of the last one: the lanes that used their second slot
  jmp_buf resume;
  ucontext_t first;
  std::vector<std::vector<Copy>> copies;  // cp.async
  std::vector<std::function<void()>> products;  // wgmma
};

struct Warp {
  alignas(16) unsigned char slots[2][kLanes][kSlotBytes];
  unsigned arrived = 0;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<unsigned char> shared;
  const std::function<void()>* kernel = nullptr;
  int current = -1;
  int arrived[16] = {}, arrivals_wanted[16] = {};  // of threads that went on
  std::map<const void*, std::vector<std::function<void()>>> late;  // copies, by the barrier that they count at
  bool copies_are_late = false;
  jmp_buf scheduler;
};

Block* running = nullptr;

std::vector<std::unique_ptr<unsigned char[]>>& stacks() {
  static std::vector<std::unique_ptr<unsigned char[]>> pool;
  return pool;
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "emulator: %s (block %u of %u, %u threads a block)\n", what.c_str(), blockIdx.x, gridDim.x,
               static_cast<unsigned>(running->threads.size()));
  std::abort();
}

Thread& self() { return running->threads[static_cast<std::size_t>(running->current)]; }

void leave(State state) {
  Thread& thread = self();
  thread.state = state;
  if (_setjmp(thread.resume) == 0) _longjmp(running->scheduler, 1);
}

void thread_main() {
  (*running->kernel)();
  leave(State::kDone);
  fail("a finished thread was resumed");
}

void enter(int index) {
  Block& block = *running;
  block.current = index;
  Thread& thread = block.threads[static_cast<std::size_t>(index)];
  threadIdx = thread.index;
  thread.state = State::kReady;
  if (_setjmp(block.scheduler) != 0) return;  // back from the thread
  if (thread.started) _longjmp(thread.resume, 1);
  thread.started = true;
  setcontext(&thread.first);
}

// Opens every barrier that has all the threads it waits for.
bool release_barriers() {
  Block& block = *running;
  int alive = 0, waiting[16] = {}, wanted[16] = {};
  for (const Thread& thread : block.threads) {
    alive += thread.state != State::kDone;
    if (thread.state != State::kAtBarrier) continue;
    ++waiting[thread.barrier];
    wanted[thread.barrier] = thread.barrier_count;
  }
  bool any = false;
  for (int number = 0; number < 16; ++number) {
    if (waiting[number] == 0) continue;
    waiting[number] += block.arrived[number];
    const int needed = wanted[number] == 0 ? alive : wanted[number];
    if (block.arrived[number] > 0 && block.arrivals_wanted[number] != needed) fail("threads count barrier " + std::to_string(number) + " differently");
    if (waiting[number] > needed) fail("barrier " + std::to_string(number) + " has more threads than it counts");
    if (waiting[number] < needed) continue;
    for (Thread& thread : block.threads)
      if (thread.state == State::kAtBarrier && thread.barrier == number) thread.state = State::kReady;
    block.arrived[number] = 0;
    any = true;
  }
  return any;
}

std::vector<int> thread_order(int count) {
  std::vector<int> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  const char* choice = std::getenv("GRPO_MC_EMULATOR_ORDER");
  const std::string text = choice == nullptr ? "ascending" : choice;
  if (text == "descending") std::reverse(order.begin(), order.end());
  else if (text != "ascending") {
    std::mt19937 generator(static_cast<unsigned>(std::stoul(text)));
    std::shuffle(order.begin(), order.end(), generator);
  }
  return order;
}

void run_block(const std::vector<int>& order) {
  long idle = 0;
  for (;;) {
    bool ran = false, spun = false, left = false;
    for (const int index : order) {
      const State before = running->threads[static_cast<std::size_t>(index)].state;
      left |= before != State::kDone;
      if (before != State::kReady && before != State::kSpinning) continue;
      enter(index);
      (before == State::kSpinning ? spun : ran) = true;
    }
    if (!left) return;
    if (release_barriers()) ran = true;
    if (!ran && !spun) fail("every thread waits: some barrier or warp operation is not reached by all");
    idle = ran ? 0 : idle + 1;
    if (idle > kMostIdleRounds) fail("threads spin for ever");
  }
}

void prepare(Block& block, dim3 size) {
  const std::size_t count = std::size_t{size.x} * size.y * size.z;
  while (stacks().size() < count) stacks().push_back(std::make_unique<unsigned char[]>(kStackBytes));
  block.threads = std::vector<Thread>(count);
  block.warps = std::vector<Warp>((count + kLanes - 1) / kLanes);
  for (std::size_t i = 0; i < count; ++i) {
    Thread& thread = block.threads[i];
    thread.index = {static_cast<unsigned>(i) % size.x, static_cast<unsigned>(i) / size.x % size.y, static_cast<unsigned>(i) / size.x / size.y};
    getcontext(&thread.first);
    thread.first.uc_stack.ss_sp = stacks()[i].get();
    thread.first.uc_stack.ss_size = kStackBytes;
    thread.first.uc_link = nullptr;
    makecontext(&thread.first, thread_main, 0);
  }
}

}  // namespace

std::vector<std::vector<Copy>>& copies_under_way() { return self().copies; }

std::vector<std::function<void()>>& products_under_way() { return self().products; }

void fail(const char* what) { fail(std::string(what)); }

void later(const void* barrier, std::function<void()> work) {
  if (running->copies_are_late) running->late[barrier].push_back(std::move(work));
  else work();
}

void make_late_copies(const void* barrier) {
  const auto found = running->late.find(barrier);
  if (found == running->late.end()) return;
  const std::vector<std::function<void()>> all = std::move(found->second);
  running->late.erase(found);
  for (const auto& work : all) work();
}

int lane() { return running->current % kLanes; }

unsigned char* shared_memory() {
  const auto address = reinterpret_cast<std::uintptr_t>(running->shared.data());
  return reinterpret_cast<unsigned char*>((address + 1023) & ~std::uintptr_t{1023});
}

void wait_at_barrier(int number, int count) {
  self().barrier = number;
  self().barrier_count = count;
  leave(State::kAtBarrier);
}

void arrive_at_barrier(int number, int count) {
  ++running->arrived[number];
  running->arrivals_wanted[number] = count;
}

void yield_thread() { leave(State::kSpinning); }

Brought exchange(unsigned mask, const void* mine, std::size_t bytes) {
  Thread& thread = self();
  Warp& warp = running->warps[static_cast<std::size_t>(running->current / kLanes)];
  Thread* const lanes = &running->threads[static_cast<std::size_t>(running->current / kLanes * kLanes)];
  const int count = static_cast<int>(std::min<std::ptrdiff_t>(kLanes, running->threads.data() + running->threads.size() - lanes));
  if (count < kLanes) mask &= (1u << count) - 1;
  if ((mask >> lane() & 1u) == 0) fail("a lane takes part in a warp operation whose mask leaves it out");
  std::memcpy(warp.slots[thread.exchanges++ % 2][lane()], mine, bytes);
  thread.mask = mask;
  warp.arrived |= 1u << lane();
  if ((warp.arrived & mask) != mask) {
    leave(State::kInWarp);
    return {warp.slots, thread.second};
  }
  warp.arrived &= ~mask;
  unsigned second = 0;
  for (int i = 0; i < count; ++i)
    if ((mask >> i & 1u) != 0 && lanes[i].exchanges % 2 == 0) second |= 1u << i;
  for (int i = 0; i < count; ++i) {
    if ((mask >> i & 1u) == 0) continue;
    if (lanes[i].mask != mask) fail("lanes of one warp operation name different masks");
    lanes[i].second = second;
    lanes[i].state = State::kReady;
  }
  return {warp.slots, second};
}

void run_grid(dim3 grid, dim3 size, std::size_t shared_bytes, const std::function<void()>& kernel) {
  if (std::getenv("GRPO_MC_EMULATOR_TRACE") != nullptr)
    std::fprintf(stderr, "emulator: grid %u x %u x %u, block %u x %u x %u, %zu bytes of shared memory\n", grid.x, grid.y, grid.z, size.x,
                 size.y, size.z, shared_bytes);
  Block block;
  running = &block;
  block.kernel = &kernel;
  gridDim = grid;
  blockDim = size;
  const std::vector<int> order = thread_order(static_cast<int>(size.x * size.y * size.z));
  block.copies_are_late = order.front() > order.back();
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        block.shared.assign(shared_bytes + 1024 + kCanaryBytes, kCanary);
        prepare(block, size);
        run_block(order);
        if (!block.late.empty()) fail("copies that no thread has waited for");
        if (std::any_of(block.arrived, block.arrived + 16, [](int count) { return count != 0; })) fail("threads arrived at a barrier that none waits at");
        for (std::size_t i = 0; i < kCanaryBytes - 1; ++i)
          if (shared_memory()[shared_bytes + i] != kCanary) fail("the kernel wrote behind its dynamic shared memory");
      }
  running = nullptr;
}

}  // namespace emulator
