// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four random words as a pure
// function of a counter and a key. The same as grpo_mc/rollout/random_numbers.py.
#pragma once

#include "common/numerics.h"

namespace grpo_mc {

// Word `index % 4` of the block that counter index / 4 gives under the seed: a random word for every index.
GRPO_MC_HD void philox_block(uint64_t block, uint64_t seed, uint32_t* words) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0, product1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// A uniform number in [0, 1): the word's upper 24 bits.
GRPO_MC_HD float unit_float(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

}  // namespace grpo_mc
