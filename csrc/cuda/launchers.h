// The launcher of every kernel, each defined in the .cu file of its operator.
#pragma once

#include "common/arguments.h"

namespace grpo_mc::cuda {

const char* rms_norm(const RmsNorm& p, void* stream);

}  // namespace grpo_mc::cuda
