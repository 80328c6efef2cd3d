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

  // Selected: an index that is known at run time only would put the words into memory.
  FLASH_HD uint32_t pick(uint32_t i) const {
    const uint32_t front = i == 0 ? word[0] : word[1], back = i == 2 ? word[2] : word[3];
    return i < 2 ? front : back;
  }

  // Number `i` of the rounds.
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
    PhiloxRow row{key, x.word[0], x.word[3] ^ Philox::RoundKey::of(key, 1).high, 0, 0, 0};
    x.word[0] = 0;
    x.round(key, 1);
    row.after_c0 = x.word[1] ^ Philox::RoundKey::of(key, 2).low;
    x.word[3] = 0;
    x.round(key, 2);
    row.after_c2 = x.word[2], row.after_c3 = x.word[3];
    return row;
  }
  // Counts from c1 on: at() takes what is above its highest bit.
  FLASH_HD PhiloxRow from(uint32_t c1) const {
    PhiloxRow row = *this;
    row.before_c0 ^= c1;
    return row;
  }
  // Of the rounds that are left for every c1.
  static constexpr int kOwnRounds = Philox::kRounds - 3;
  FLASH_HD Philox::RoundKey own_key(int i) const { return Philox::RoundKey::of(key, i + 3); }
  FLASH_HD Philox at(uint32_t c1, const Philox::RoundKey (&keys)[kOwnRounds]) const {
    const uint64_t a = Philox::product(Philox::kFirst, before_c0 ^ c1);
    const uint64_t b = Philox::product(Philox::kSecond, high(a) ^ before_c2);
    Philox x{{high(b) ^ after_c0, low(b), low(a) ^ after_c2, after_c3}};
    for (int i = 0; i < kOwnRounds; i++) x.round(keys[i]);
    return x;
  }
  FLASH_HD Philox at(uint32_t c1) const {
    Philox::RoundKey keys[kOwnRounds];
    for (int i = 0; i < kOwnRounds; i++) keys[i] = own_key(i);
    return at(c1, keys);
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

  // One call serves sixteen columns of two rows, `row` and the one that differs in bit 3: with q = lane % 4, the
  // columns 64g + 8i + 2q + {0, 1}, i = 0..7. That is what one thread owns of a tile of 16 x 64 in the accumulator
  // fragments of mma and wgmma. `head` counts batch * num_heads + head.
  FLASH_HD Philox draw(uint32_t head, uint32_t row, uint32_t col) const {
    return Philox::at(seed, row & ~8u, counter(col), head, uint32_t(offset));
  }
  // The same as of_row(head, row).at(counter(col)), for many columns of a row.
  FLASH_HD PhiloxRow of_row(uint32_t head, uint32_t row) const {
    return PhiloxRow::of(seed, row & ~8u, head, uint32_t(offset));
  }
  FLASH_HD static uint32_t counter(uint32_t col) { return (col / 64) * 4 + (col / 2) % 4; }

  // The random bits of columns col and col + 1 of a row, col even, in one word. A call serves sixteen such: its own
  // four and, modulo 2^32, twelve sums of two of these, one of them with a factor.
  //
  // Any two of the sixteen are as independent as two of the call, since a minor of their factors is odd; or is 2 modulo
  // 4, and then all but their lowest bits are. So any two entries of a matrix are dropped independently. More than two
  // are not, exactly: w, x and w * factor + x are related. The factors are chosen so that |a b c| > 14000 in every
  // a w + b x + c y = 0 modulo 2^15, which is about the lower halves (> 8e8 modulo 2^31), and no three entries are
  // correlated by more than 2e-4; tests/host/test_dropout.cpp counts threes and fours.
  FLASH_HD static uint32_t word(const Philox& random, uint32_t row, uint32_t col) {
    const uint32_t i = col / 8 % 4, set = row / 8 % 2 * 2 + col / 32 % 2;
    return factor(set) * random.pick(i) + random.pick((i + set) % 4);
  }
  FLASH_HD static uint32_t factor(uint32_t set) {
    return set == 0 ? 0 : set == 1 ? 0xC8B2B839u : set == 2 ? 0xCB4E4786u : 0xB965C7AFu;
  }

  // 15 bits of every 16: the spare one takes the carry where two entries are compared in one register.
  FLASH_HD bool keep(const Philox& random, uint32_t row, uint32_t col) const {
    return ((word(random, row, col) >> (16 * (col % 2))) & 0x7FFFu) >= threshold;
  }
  // Two neighbouring columns at once, from their word: bits 15 and 31 are set where an entry is kept.
  FLASH_HD uint32_t kept_signs(uint32_t word) const { return (word | 0x80008000u) - threshold * 0x10001u; }
  FLASH_HD bool keep(uint32_t head, uint32_t row, uint32_t col) const { return keep(draw(head, row, col), row, col); }
};

}  // namespace flash
