// From S to P and from dP to dS, on the transposed tile that a main warpgroup holds: 64 keys (rows) x kBlockM queries
// (columns). A thread owns the keys `key` and `key + 8` and, of every 8 queries, 2 * (lane % 4) + {0, 1}:
// acc[4g + 2r + c] is key + 8r and query 8g + 2 * (lane % 4) + c.
#pragma once

#include "bwd_args.cuh"

namespace flash::sm90 {

// LSE (kWhich 0) or delta (kWhich 1) of this thread's two queries of each group of eight, from [kBlockM/16][2][16].
// Loaded before the wait for the product that needs them: behind it their latency would be in the open.
template <int kGroups>
struct QueryStats {
  float2 of[kGroups];

  template <int kWhich>
  __device__ __forceinline__ void load(uint32_t stats) {
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      const uint32_t address =
          stats + (g / 2) * (kBandStats * 4) + kWhich * (kBandRows * 4) + (g % 2) * 32 + threadIdx.x % 4 * 8;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(of[g].x), "=f"(of[g].y) : "r"(address));
    }
  }
};

// Which of a thread's entries are visible: queries [begin[r], end[r]) of its two keys, counted from its first query.
struct VisibleQueries {
  int begin[2], end[2];

  __device__ __forceinline__ static VisibleQueries of(const Band& band, int key, int first_query) {
    VisibleQueries v;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      v.begin[r] = band.query_begin(key + 8 * r) - first_query;
      v.end[r] = band.query_end(key + 8 * r) - first_query;
    }
    return v;
  }
  // Entry i of an accumulator; i is known when compiling.
  __device__ __forceinline__ bool operator()(int i) const {
    const int query = 8 * (i / 4) + i % 2, r = i / 2 % 2;
    return query >= begin[r] && query < end[r];
  }
};

// acc_s: S in, P out. Selecting after the exponential keeps whatever a hidden row holds out of the result.
template <int kCount>
__device__ __forceinline__ void exponentials(float (&acc_s)[kCount], const QueryStats<kCount / 4>& lse,
                                             float scale_log2) {
#pragma unroll
  for (int g = 0; g < kCount / 4; g++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float* s = acc_s + 4 * g + 2 * r;
      s[0] = exp2_approx(fmaf(s[0], scale_log2, -lse.of[g].x));
      s[1] = exp2_approx(fmaf(s[1], scale_log2, -lse.of[g].y));
    }
  }
}

template <int kCount>
__device__ __forceinline__ void hide(float (&acc_s)[kCount], const VisibleQueries& visible) {
#pragma unroll
  for (int i = 0; i < kCount; i++) acc_s[i] = visible(i) ? acc_s[i] : 0.f;
}

// How a main warpgroup's keys see a tile of queries: not at all, some of it, all of it.
enum class Visit { kSkip, kMasked, kFull };

// P as the A operand of dV: fragments of 16 queries.
template <class T, int kCount>
__device__ __forceinline__ void pack_fragments(const float (&acc)[kCount], uint32_t (&fragments)[kCount / 8][4]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) fragments[i / 8][i / 2 % 4] = pack2<T>(acc[i], acc[i + 1]);
}

// dS = factor * (dP - delta) as the A operand of dK. `factor(i)` gives what exponentials left of P for entries i and
// i + 1, `entries` (bwd_kept.cuh) what dropout leaves of dP. A factor of 0 gives 0 whatever dP and delta hold: rows
// beyond a segment may be NaN. `first`: number of the first entry here, for `entries`.
template <class T, bool kMasked, int kCount, class Entries, class Factor>
__device__ __forceinline__ void score_gradients(const float (&acc_dp)[kCount], uint32_t (&ds_fragments)[kCount / 8][4],
                                                const QueryStats<kCount / 4>& deltas, const Entries& entries,
                                                Factor factor, int first = 0) {
#pragma unroll
  for (int g = 0; g < kCount / 4; g++) {
    const float2 delta = deltas.of[g];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = 4 * g + 2 * r;
      const float2 f = factor(i);
      float2 ds = {f.x * entries.minus_delta(acc_dp[i], delta.x, first + i),
                   f.y * entries.minus_delta(acc_dp[i + 1], delta.y, first + i + 1)};
      if constexpr (kMasked) ds = {f.x == 0.f ? 0.f : ds.x, f.y == 0.f ? 0.f : ds.y};
      ds_fragments[i / 8][i / 2 % 4] = pack2<T>(ds.x, ds.y);
    }
  }
}

}  // namespace flash::sm90
