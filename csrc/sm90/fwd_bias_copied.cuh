// Bias that other warps bring to shared memory (fwd_bias_producer.cuh), as a consumer warpgroup takes it. Where it is
// the only option, that happens under products: between P V and Q K^T, into the accumulator that Q K^T is added to; or,
// where Q K^T comes first, into registers.
#pragma once

#include "../ptx/fence.cuh"
#include "../ptx/matrix.cuh"
#include "fwd_traits.cuh"

namespace flash::sm90 {

// The 64 x 64 numbers of a block in the 128-byte swizzle (wgmma.cuh), in the order of the accumulator.
template <class Traits>
class BiasBlock {
  using Element = typename Traits::Element;
  uint32_t first;  // address of this lane's row in the matrices of ldmatrix
  uint32_t pair[4];

 public:
  // row_step: 0 where all queries share the first row.
  __device__ __forceinline__ BiasBlock(uint32_t tile, int row_step) {
    // Matrices of 8 columns and 8 rows: the rows 8 further down, then the next columns.
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int row = row_step * (threadIdx.x % 128 / 32 * 16 + matrix % 2 * 8 + lane % 8);
    first = tile + row * 128 + ((matrix / 2) ^ (row % 8)) * 16;
  }

  // Of scores 8i ... 8i + 7.
  __device__ __forceinline__ void load(int i, uint32_t (&pairs)[4]) const { ptx::ldmatrix_x4(pairs, first ^ (i * 32)); }

  // Of score i; to be asked for in order.
  __device__ __forceinline__ float operator()(int i) {
    if (i % 8 == 0) load(i / 8, pair);
    return of_pairs(pair, i % 8);
  }
  __device__ __forceinline__ static float of_pairs(const uint32_t (&pairs)[4], int i) {
    const float2 x = unpack2<Element>(pairs[i / 2]);
    return i % 2 ? x.y : x.x;
  }
};

// Beside such a bias any q.k is nothing; with such a factor a smaller one does not overflow.
inline constexpr float kLargeBias = 1e30f, kMaxQkPerScore = 1e6f;

template <class Traits>
class FwdCopiedBias {
  static constexpr int kScores = Traits::kBlockN / 2;
  static constexpr bool kAlone = Traits::kOption == Option::kBias;

 public:
  static constexpr bool kFirst = kAlone && Traits::kTile.order == Order::kJoint;
  static constexpr bool kAhead = kAlone && Traits::kTile.order == Order::kOverlap;

  __device__ __forceinline__ FwdCopiedBias(const FwdArgs& a, const FwdSmem<Traits>& s, int w)
      : args(a), smem(s), warpgroup(w) {}

  // kFirst: what Q K^T is added to, bias in its units.
  __device__ __forceinline__ void start(float (&acc_s)[kScores]) const {
    BiasBlock<Traits> bias = block();
#pragma unroll
    for (int i = 0; i < kScores; i++) acc_s[i] = bias(i) * args.qk_per_score;
  }
  // Their sum -> what enters the softmax. A large bias has overflown in units of q.k.
  __device__ __forceinline__ void finish(float (&acc_s)[kScores]) const {
    BiasBlock<Traits> bias = block();
#pragma unroll
    for (int i = 0; i < kScores; i++) {
      const float b = bias(i);
      acc_s[i] = fabsf(b) >= kLargeBias ? b : acc_s[i] * args.params.softmax_scale;
    }
  }

  // kAhead: brings that of the block whose products are under way.
  __device__ __forceinline__ void load() {
    const BiasBlock<Traits> bias = block();
#pragma unroll
    for (int i = 0; i < kScores / 8; i++) bias.load(i, pairs[i]);
    ptx::fence_proxy_async();  // ldmatrix is no load that the arrival waits for
    give_back();
  }
  __device__ __forceinline__ float loaded(int i) const { return BiasBlock<Traits>::of_pairs(pairs[i / 8], i % 8); }

  // acc * factor + bias.
  __device__ __forceinline__ void add(float (&acc_s)[kScores], float factor) const {
    if constexpr (kAhead) {
#pragma unroll
      for (int i = 0; i < kScores; i++) acc_s[i] = fmaf(acc_s[i], factor, loaded(i));
    } else {
      BiasBlock<Traits> bias = block();
#pragma unroll
      for (int i = 0; i < kScores; i++) acc_s[i] = fmaf(acc_s[i], factor, bias(i));
    }
  }

  // P is there. Without other options all of the bias has been read then, since P depends on it.
  __device__ __forceinline__ void release() {
    if constexpr (kAhead) return;
    if constexpr (!kAlone) ptx::fence_proxy_async();
    give_back();
  }

 private:
  const FwdArgs& args;
  const FwdSmem<Traits> smem;
  const int warpgroup;
  RingState ring{0};
  uint32_t pairs[kAhead ? kScores / 8 : 1][4];  // this thread's, of the block at hand

  __device__ __forceinline__ BiasBlock<Traits> block() const {
    ptx::mbarrier_wait(smem.bias_full(ring.stage, warpgroup), ring.parity);
    return {smem.bias(ring.stage, warpgroup), args.bias_row_step};
  }
  // The copy engine may overwrite it from here on.
  __device__ __forceinline__ void give_back() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.bias_empty(ring.stage, warpgroup));
    ring.template advance<FwdSmem<Traits>::kBiasStages>();
  }
};

}  // namespace flash::sm90
