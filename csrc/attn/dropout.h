// Counter-based dropout: whether entry (row, col) of a head's matrix is kept depends on nothing but the seed, the
// offset and its position, so that forward, backward and every path drop the same entries. Philox4x32 with 7 rounds:
// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (7 rounds pass BigCrush).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flash {

struct Philox {
  static constexpr int kRounds = 7;
  uint32_t word[4];

  template <int kRounds = Philox::kRounds>
  FLASH_HD static Philox at(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    Philox x{{c0, c1, c2, c3}};
    for (int i = 0; i < kRounds; i++) x.round(key, i);
    return x;
  }

  // Number `i` of the rounds. Who works on two counters at once hides the latency of the products.
  FLASH_HD void round(uint64_t key, uint32_t i) {
    const uint64_t a = product(0xD2511F53u, word[0]), b = product(0xCD9E8D57u, word[2]);
    word[0] = uint32_t(b >> 32) ^ word[1] ^ (uint32_t(key) + i * 0x9E3779B9u);
    word[2] = uint32_t(a >> 32) ^ word[3] ^ (uint32_t(key >> 32) + i * 0xBB67AE85u);
    word[1] = uint32_t(b);
    word[3] = uint32_t(a);
  }

 private:
  FLASH_HD static uint64_t product(uint32_t x, uint32_t y) {
#ifdef __CUDA_ARCH__
    uint64_t xy;  // of a product of 64-bit numbers the compiler adds up the halves, a fifth of all instructions
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(xy) : "r"(x), "r"(y));
    return xy;
#else
    return uint64_t(x) * y;
#endif
  }
};

struct Dropout {
  uint64_t seed, offset;
  uint32_t threshold;  // of 32768: an entry is dropped if its 15 random bits are below
  float scale;         // of kept entries: 1 / (1 - p)

  FLASH_HD static Dropout of(float p, const int64_t* rng_state) {
    return {uint64_t(rng_state[0]), uint64_t(rng_state[1]), threshold_of(p), 1.f / (1.f - p)};
  }
  FLASH_HD static uint32_t threshold_of(float p) { return uint32_t(p * 32768.f + 0.5f); }

  // One call serves eight columns of a row: with q = lane % 4, the columns 32g + 8i + 2q + {0, 1}, i = 0..3. That is
  // what one thread owns of a row in the accumulator fragment of mma and wgmma. `head` counts batch * num_heads + head.
  FLASH_HD Philox octet(uint32_t head, uint32_t row, uint32_t col) const {
    return Philox::at(seed, row, (col / 32) * 4 + (col / 2) % 4, head, uint32_t(offset));
  }
  // Of rows `row` and `row + 1`.
  FLASH_HD void octets(uint32_t head, uint32_t row, uint32_t col, Philox (&x)[2]) const {
    for (uint32_t r = 0; r < 2; r++) x[r] = {{row + r, (col / 32) * 4 + (col / 2) % 4, head, uint32_t(offset)}};
    for (uint32_t i = 0; i < Philox::kRounds; i++)
      for (int r = 0; r < 2; r++) x[r].round(seed, i);
  }
  // 15 bits of every 16: the spare one takes the carry where two entries are compared in one register.
  FLASH_HD bool keep(const Philox& random, uint32_t col) const {
    return ((random.word[(col / 8) % 4] >> (16 * (col % 2))) & 0x7FFFu) >= threshold;
  }
  // Two neighbouring columns at once, from their word: bits 15 and 31 are set where an entry is kept.
  FLASH_HD uint32_t kept_signs(uint32_t word) const { return (word | 0x80008000u) - threshold * 0x10001u; }
  FLASH_HD bool keep(uint32_t head, uint32_t row, uint32_t col) const { return keep(octet(head, row, col), col); }
};

}  // namespace flash
