// End of a tile: O divided by the row sums, stored from registers, and LSE.
#pragma once

#include "fwd_scores.cuh"
#include "fwd_softmax.cuh"

namespace flash::sm90 {

// Denominator and LSE of one row from its reference, in score units, and its sum.
struct RowResult {
  float inverse_sum;  // 0: the row sees no key
  float lse;
};

// In natural units, since `reference` may be so large that its log2 units overflow.
// A sink (-inf: none) joins the denominator; whichever is larger becomes the reference. Without a branch: at 512 keys
// the length of this code shows.
__device__ __forceinline__ RowResult row_result(float reference, float sum, float scale, float sink) {
  const float top = reference * scale, joint = fmaxf(top, sink);
  const bool empty = !(sum != 0.f);  // a NaN is not empty
  const float share = exp2_approx((top - joint) * kLog2e);
  const float total = fmaf(sum, share, exp2_approx((sink - joint) * kLog2e));
  return {empty ? 0.f : __fdividef(share, total), empty ? sink : joint + log2f(total) * kLn2};
}

// Row r of a thread's two, times factor; nowhere if out is nullptr. A quad of lanes exchanges words so that each lane
// stores 16 bytes at once.
template <class Out, int kOut>
__device__ __forceinline__ void store_row(const float (&acc_o)[kOut], int r, float factor, bool empty, Out* out,
                                          int head_dim_v) {
  static_assert(kOut % 16 == 0, "head_dim_v: a multiple of 32");
  const int quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < kOut / 4; g += 4) {
    uint32_t word[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float a = acc_o[4 * (g + j) + 2 * r] * factor, b = acc_o[4 * (g + j) + 2 * r + 1] * factor;
      word[j] = empty ? 0 : pack2<Out>(a, b);
    }
    // Transpose the 4 x 4 words of the quad: lane i then holds the four words of column group g + i.
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const uint32_t other = __shfl_xor_sync(~0u, quad_lane & 1 ? word[j] : word[j + 1], 1);
      word[j] = quad_lane & 1 ? other : word[j];
      word[j + 1] = quad_lane & 1 ? word[j + 1] : other;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const uint32_t other = __shfl_xor_sync(~0u, quad_lane & 2 ? word[j] : word[j + 2], 2);
      word[j] = quad_lane & 2 ? other : word[j];
      word[j + 2] = quad_lane & 2 ? word[j + 2] : other;
    }
    const int column = 8 * (g + quad_lane);
    if (out != nullptr && column < head_dim_v)
      *reinterpret_cast<uint4*>(out + column) = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

// acc_o (64, head_dim_v) of the warpgroup.
template <class Traits>
__device__ __forceinline__ void store_tile(const float (&acc_o)[Traits::kHeadDimV / 2],
                                           const FwdSoftmax<Traits>& softmax, const FwdArgs& args, const Tile& tile,
                                           FragmentPlace at) {
  using Element = typename Traits::Element;
  const FwdParams& p = args.params;
  const int quad_lane = threadIdx.x % 4;
  const float sink = p.sinks != nullptr ? p.sinks[tile.head] : -CUDART_INF_F;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = at.row + 8 * r;
    float sum = softmax.row_sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const RowResult result = row_result(softmax.reference[r], sum, args.scale, sink);
    const bool exists = row < tile.seqlen_q;
    if (quad_lane == 0 && exists) p.lse.ptr[offset_of(p.lse, tile.batch, tile.q0, row, tile.head)] = result.lse;

    float factor = result.inverse_sum;
    if constexpr (Traits::kGeneral) {
      if (p.dropout_p != 0.f) factor *= 1.f / (1.f - p.dropout_p);
    }
    // Where no key is seen, acc_o may be 0 * NaN: nothing but zeros may come out.
    const bool empty = result.inverse_sum == 0.f;
    Element* out = static_cast<Element*>(p.out.ptr) + offset_of(p.out, tile.batch, tile.q0, row, tile.head);
    store_row(acc_o, r, factor, empty, exists ? out : nullptr, p.head_dim_v);
  }
}

}  // namespace flash::sm90
