// Which entries dropout keeps. The bits of 64 keys x 64 queries are made by warps of the producer warpgroup, and lie in
// shared memory as one word per thread of the main warpgroup that uses them.
#pragma once

#include "../attn/dropout.h"
#include "bwd_args.cuh"

namespace flash::sm90 {

// This thread's word.
__device__ __forceinline__ uint32_t kept_bits(uint32_t words) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(words + threadIdx.x % 128 * 4));
  return word;
}

// By a warp; the places are bwd_layout.h's. kParts warps share the queries: part 0 makes the upper bits of all words.
template <int kParts>
__device__ __forceinline__ void write_kept_bits(uint32_t words, const Dropout& dropout, uint32_t head, int first_key,
                                                int first_query, int part) {
  constexpr int kGroups = 8 / kParts;
  const int lane = threadIdx.x % 32, key = first_key + kept_key(lane);
  const int query = first_query + kept_query(lane) + part * kGroups * 8;
  uint32_t bits[2][2] = {};  // [warp][key of the pair]
#pragma unroll 1
  for (int group = 0; group < kGroups; group++) {
    Philox random[2];
    dropout.draw_two(head, query + 8 * group, key, random);
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t signs = dropout.kept_signs(Dropout::word(random[c], key + 8 * i));
        bits[i / 2][0] = __funnelshift_l(signs << 16, bits[i / 2][0], 1);
        bits[i / 2][1] = __funnelshift_l(signs, bits[i / 2][1], 1);
      }
  }
#pragma unroll
  for (int warp = 0; warp < 2; warp++)
#pragma unroll
    for (int of_pair = 0; of_pair < 2; of_pair++) {
      const uint32_t address = words + kept_thread(lane, warp, of_pair) * 4, x = bits[warp][of_pair];
      if constexpr (kParts == 1)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
      else
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(address + (1 - part) * 2), "h"(uint16_t(x)) : "memory");
    }
  static_assert(kParts <= 2);
}

}  // namespace flash::sm90
