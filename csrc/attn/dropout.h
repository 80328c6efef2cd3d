// Counter-based dropout: whether entry (row, col) of a head's matrix is kept depends on nothing but the seed, the
// offset and its position, so that forward, backward and every path drop the same entries. Philox4x32 with 7 rounds:
// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (7 rounds pass BigCrush).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flash {

struct Philox {
  static constexpr uint32_t kFirst = 0xD2511F53u, kSecond = 0xCD9E8D57u;
  static constexpr int kRounds = 7;
  uint32_t word[4];

  template <int kRounds = Philox::kRounds>
  FLASH_HD static Philox at(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    Philox x{{c0, c1, c2, c3}};
    for (int i = 0; i < kRounds; i++) x.round(key, i);
    return x;
  }

  struct RoundKey {
    uint32_t low, high;
    FLASH_HD static RoundKey of(uint64_t key, uint32_t i) {
      return {uint32_t(key) + i * 0x9E3779B9u, uint32_t(key >> 32) + i * 0xBB67AE85u};
    }
  };

  // Number `i` of the rounds. Who works on two counters at once hides the latency of the products.
  FLASH_HD void round(uint64_t key, uint32_t i) { round(RoundKey::of(key, i)); }
  FLASH_HD void round(const RoundKey& key) {
    const uint64_t a = product(kFirst, word[0]), b = product(kSecond, word[2]);
    word[0] = uint32_t(b >> 32) ^ word[1] ^ key.low;
    word[2] = uint32_t(a >> 32) ^ word[3] ^ key.high;
    word[1] = uint32_t(b);
    word[3] = uint32_t(a);
  }

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

// Philox::at(key, c0, c1, c2, c3) for many c1: three rounds hold two products that c1 has no part in, and what comes
// of them is worked out once.
struct PhiloxRow {
  uint64_t key;
  uint32_t before_c0, before_c2, after_c0, after_c2, after_c3;

  FLASH_HD static PhiloxRow of(uint64_t key, uint32_t c0, uint32_t c2, uint32_t c3) {
    Philox x{{c0, 0, c2, c3}};
    x.round(key, 0);
    PhiloxRow row{key, x.word[0], x.word[3] ^ (high(key) + 0xBB67AE85u), 0, 0, 0};
    x.word[0] = 0;
    x.round(key, 1);
    row.after_c0 = x.word[1] ^ (low(key) + 2 * 0x9E3779B9u);
    x.word[3] = 0;
    x.round(key, 2);
    row.after_c2 = x.word[2], row.after_c3 = x.word[3];
    return row;
  }
  // The first product that c1 has a part in. It is the same for all rows of a head, whose c0 differ.
  FLASH_HD uint64_t first_product(uint32_t c1) const { return Philox::product(Philox::kFirst, before_c0 ^ c1); }
  // Counts from c1 on: at() takes what is above its highest bit.
  FLASH_HD PhiloxRow from(uint32_t c1) const {
    PhiloxRow row = *this;
    row.before_c0 ^= c1;
    return row;
  }
  FLASH_HD Philox at(uint32_t c1) const {
    Philox::RoundKey keys[kOwnRounds];
    for (int i = 0; i < kOwnRounds; i++) keys[i] = own_key(i);
    return of_first_product(first_product(c1), keys);
  }
  // Of the rounds that are left for every c1.
  static constexpr int kOwnRounds = Philox::kRounds - 3;
  FLASH_HD Philox::RoundKey own_key(int i) const { return Philox::RoundKey::of(key, i + 3); }
  FLASH_HD Philox of_first_product(uint64_t a, const Philox::RoundKey (&keys)[kOwnRounds]) const {
    const uint64_t b = Philox::product(Philox::kSecond, high(a) ^ before_c2);
    Philox x{{high(b) ^ after_c0, low(b), low(a) ^ after_c2, after_c3}};
    for (int i = 0; i < kOwnRounds; i++) x.round(keys[i]);
    return x;
  }

 private:
  FLASH_HD static uint32_t low(uint64_t x) { return uint32_t(x); }
  FLASH_HD static uint32_t high(uint64_t x) { return uint32_t(x >> 32); }
};

struct Dropout {
  uint64_t seed, offset;
  uint32_t threshold;  // of 32768: an entry is dropped if its 15 random bits are below
  float scale;         // of kept entries: 1 / (1 - p)

  FLASH_HD static Dropout of(float p, const int64_t* rng_state) {
    return {uint64_t(rng_state[0]), uint64_t(rng_state[1]), threshold_of(p), 1.f / (1.f - p)};
  }
  FLASH_HD static uint32_t threshold_of(float p) { return uint32_t(p * 32768.f + 0.5f); }

  // One call serves sixteen columns of a row: with q = lane % 4, the columns 64g + 8i + 2q + {0, 1}, i = 0..7. That is
  // what one thread owns of a row in the accumulator fragment of mma and wgmma. `head` counts batch * num_heads + head.
  FLASH_HD Philox draw(uint32_t head, uint32_t row, uint32_t col) const {
    return Philox::at(seed, row, counter(col), head, uint32_t(offset));
  }
  // Of rows `row` and `row + 1`.
  FLASH_HD void draw_two(uint32_t head, uint32_t row, uint32_t col, Philox (&x)[2]) const {
    for (uint32_t r = 0; r < 2; r++) x[r] = {{row + r, counter(col), head, uint32_t(offset)}};
    for (uint32_t i = 0; i < Philox::kRounds; i++)
      for (int r = 0; r < 2; r++) x[r].round(seed, i);
  }
  // The same as of_row(head, row).at(counter(col)), for many columns of a row.
  FLASH_HD PhiloxRow of_row(uint32_t head, uint32_t row) const {
    return PhiloxRow::of(seed, row, head, uint32_t(offset));
  }
  FLASH_HD static uint32_t counter(uint32_t col) { return (col / 64) * 4 + (col / 2) % 4; }
  // The random bits of columns col and col + 1, col even, in one word. Columns 32 further on have the same with the
  // bytes of each half exchanged: the leading byte decides for all but one in 128 of the entries, so that each has bits
  // of its own, while p holds to 2^-16. What the few others share correlates two such entries by less than 0.01.
  FLASH_HD static uint32_t word(const Philox& random, uint32_t col) {
    const uint32_t own = random.word[(col / 8) % 4];
    return (col / 32) % 2 == 0 ? own : exchange_bytes(own);
  }
  FLASH_HD static uint32_t exchange_bytes(uint32_t x) {
#ifdef __CUDA_ARCH__
    return __byte_perm(x, 0, 0x2301);
#else
    return (x & 0x00FF00FFu) << 8 | (x >> 8 & 0x00FF00FFu);
#endif
  }
  // 15 bits of every 16: the spare one takes the carry where two entries are compared in one register.
  FLASH_HD bool keep(const Philox& random, uint32_t col) const {
    return ((word(random, col) >> (16 * (col % 2))) & 0x7FFFu) >= threshold;
  }
  // Two neighbouring columns at once, from their word: bits 15 and 31 are set where an entry is kept.
  FLASH_HD uint32_t kept_signs(uint32_t word) const { return (word | 0x80008000u) - threshold * 0x10001u; }
  FLASH_HD bool keep(uint32_t head, uint32_t row, uint32_t col) const { return keep(draw(head, row, col), col); }
};

}  // namespace flash
