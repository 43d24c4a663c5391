// Which code runs here: the choice of instruction set, and what this library was built against.
#include <torch/library.h>

#include <cstdlib>
#include <string>

#include "cpu/kernels.h"

namespace grpo_mc {
namespace {

// The loader searches the file for this text before it loads it, so that a library built against another torch is
// refused with a sentence and not with an undefined symbol. Keep the marker in step with grpo_mc/ops/loader.py.
__attribute__((used)) const char kMarker[] = "grpo_mc-built-with-torch=" GRPO_MC_TORCH_VERSION ";";

bool detect_avx2() {
  const char* choice = std::getenv("GRPO_MC_CPU_ISA");
  const std::string isa = choice == nullptr || *choice == '\0' ? "auto" : choice;
  TORCH_CHECK_VALUE(isa == "auto" || isa == "generic" || isa == "avx2", "GRPO_MC_CPU_ISA is '", isa,
                    "'; set it to auto, generic or avx2");
#if defined(GRPO_MC_HAVE_AVX2)
  const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  const bool has = false;
#endif
  TORCH_CHECK_VALUE(isa != "avx2" || has, "GRPO_MC_CPU_ISA is avx2 but this processor or build has no AVX2, FMA and F16C");
  return has && isa != "generic";
}

std::string build_info() {
  const std::string marker(kMarker);
  const auto begin = marker.find('=') + 1;
  return "{\"built_torch\": \"" + marker.substr(begin, marker.size() - 1 - begin) + "\", \"cpu_isa\": \"" +
         (use_avx2() ? "avx2" : "generic") + "\"}";
}

}  // namespace

bool use_avx2() {
  static const bool chosen = detect_avx2();
  return chosen;
}

TORCH_LIBRARY_IMPL(grpo_mc, CompositeExplicitAutograd, m) { m.impl("build_info", build_info); }

}  // namespace grpo_mc
