// Which entries dropout keeps. The bits of 64 keys x 64 queries are made by warps of the producer warpgroup, and lie in
// shared memory as one word per thread of the main warpgroup that uses them.
#pragma once

#include "bwd_args.cuh"
#include "kept_masks.cuh"

namespace flash::sm90 {

// What a thread of a main warpgroup needs to know of its entries acc[i].
class KeptEntries {
  uint32_t word_;  // its bits
  float scale_;    // of kept entries

 public:
  // words: in shared memory
  __device__ __forceinline__ KeptEntries(const AttnParams& p, uint32_t words)
      : word_(~0u), scale_(1.f / (1.f - p.dropout_p)) {
    if (p.dropout_p != 0.f) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word_) : "r"(words + threadIdx.x % 128 * 4));
  }
  // All ones, or zeros where entry i is dropped.
  __device__ __forceinline__ uint32_t mask(int i) const {
    return ptx::signs_of_bytes(word_ << kept_shift(i), kept_byte(i) * 0x1111);
  }
  // The same for entries i and i + 1 in two halves.
  __device__ __forceinline__ uint32_t mask_of_pair(int i) const {
    return ptx::signs_of_bytes(word_ << kept_shift(i), kept_byte(i) * 0x0011 + kept_byte(i + 1) * 0x1100);
  }
  // The gradient of entry i before dropout, less delta.
  __device__ __forceinline__ float minus_delta(float dp, float delta, int i) const {
    return fmaf(__uint_as_float(__float_as_uint(dp) & mask(i)), scale_, -delta);
  }
};
// The same in a kernel without dropout.
struct AllEntries {
  __device__ __forceinline__ AllEntries(const AttnParams&, uint32_t) {}
  __device__ __forceinline__ static uint32_t mask_of_pair(int) { return ~0u; }
  __device__ __forceinline__ static float minus_delta(float dp, float delta, int) { return dp - delta; }
};
template <bool kMayDrop>
using EntriesOf = std::conditional_t<kMayDrop, KeptEntries, AllEntries>;

// By a warp; the places are bwd_layout.h's. kParts warps share the queries: with two, part 1 has those that follow part
// 0's.
template <int kParts, class Mask>
__device__ __forceinline__ void write_kept_bits(uint32_t words, const Dropout& dropout, uint32_t head, int first_key,
                                                int first_query, int part, Mask mask) {
  const int lane = threadIdx.x % 32, key = first_key + kept_key(lane), query = first_query + kept_query(lane);
#pragma unroll 1
  for (int next_query = part; next_query < 2; next_query += kParts) {
    uint32_t bits[4] = {};  // [warp]: of both keys of the pair, one in each half
#pragma unroll 1
    for (int step = 0; step < 2; step++) {  // one call at a time: registers are short
      const Philox random = dropout.draw(head, query + 16 * step + next_query, key);
#pragma unroll
      for (int warp = 0; warp < 4; warp++) {
        bits[warp] <<= 4;
#pragma unroll
        for (int i = 0; i < 4; i++)  // two queries and two keys
          bits[warp] |= mask(Dropout::word(random, i / 2 * 8, 16 * warp + i % 2 * 8)) & 0x00080008u >> i;
      }
    }
#pragma unroll
    for (int warp = 0; warp < 4; warp++)
#pragma unroll
      for (int of_pair = 0; of_pair < 2; of_pair++)
        asm volatile(
            "st.shared.b8 [%0], %1;" ::"r"(words + kept_thread(lane, warp, of_pair) * 4 + kept_byte(lane, next_query)),
            "r"(bits[warp] >> 16 * of_pair)
            : "memory");
  }
}
template <int kParts>
__device__ __forceinline__ void write_kept_bits(uint32_t words, const Dropout& dropout, uint32_t head, int first_key,
                                                int first_query, int part) {
  if (dropout.threshold <= kMaxThreshold)
    write_kept_bits<kParts>(words, dropout, head, first_key, first_query, part,
                            KeptUpToMax{dropout.threshold * 0x10001u});
  else
    write_kept_bits<kParts>(words, dropout, head, first_key, first_query, part, Kept{dropout});
}

}  // namespace flash::sm90
