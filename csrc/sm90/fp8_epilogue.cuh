// End of an FP8 tile: O divided by the row sums, times v_descale, in 16 bit; LSE.
#pragma once

#include "fp8_softmax.cuh"
#include "fp8_totals.cuh"
#include "fwd_epilogue.cuh"

namespace flash::sm90 {

template <class Traits>
__device__ __forceinline__ void store_fp8_tile(Fp8Totals<Traits>& totals, const Fp8Softmax<Traits>& softmax,
                                               const FwdArgs& args, const Tile& tile, FragmentPlace at) {
  const FwdParams& p = args.params;
  const float v_descale = Descales::of(p, tile).v;
  bool exists[2], empty[2];
  float factor[2];
  const float sink = p.sinks != nullptr ? p.sinks[tile.head] : -CUDART_INF_F;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = at.row + 8 * r;
    const RowResult result = row_result(softmax.shift[r], quad_sum(softmax.row_sum[r]), kLn2, sink);
    exists[r] = row < tile.seqlen_q;
    empty[r] = result.inverse_sum == 0.f;
    factor[r] = empty[r] ? 0.f : result.inverse_sum * v_descale;  // whatever the scale
    if (threadIdx.x % 4 == 0 && exists[r])
      p.lse.ptr[offset_of(p.lse, tile.batch, tile.q0, row, tile.head)] = result.lse;
  }
  zero_empty_rows(totals.result(), empty);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int64_t offset = offset_of(p.out, tile.batch, tile.q0, at.row + 8 * r, tile.head);
    if (p.out_dtype == DType::kF16) {
      store_row(totals.result(), r, factor[r], exists[r], static_cast<__half*>(p.out.ptr) + offset, p.head_dim_v);
    } else {
      store_row(totals.result(), r, factor[r], exists[r], static_cast<__nv_bfloat16*>(p.out.ptr) + offset,
                p.head_dim_v);
    }
  }
}

}  // namespace flash::sm90
