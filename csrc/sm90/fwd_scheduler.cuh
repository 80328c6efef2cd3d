// The tiles of one block, in order: run by the producer warp, all lanes together.
#pragma once

#include "counters.cuh"
#include "fwd_traits.cuh"

namespace flash::sm90 {

template <class Traits>
class FwdScheduler {
 public:
  __device__ __forceinline__ explicit FwdScheduler(const FwdArgs& a) : args(a), lane(threadIdx.x % 32) {}

  __device__ __forceinline__ Tile first() { return decode(blockIdx.x); }

  // Claims the next tile, as late as the latency of the counter can be hidden: so slow blocks claim less.
  __device__ __forceinline__ void claim() {
    if (args.counter_slot < 0) {
      index += gridDim.x;  // in every lane
    } else if (lane == 0) {
      index = claim_tile(args, index, gridDim.x);
    }
  }
  // The tile that was claimed.
  __device__ __forceinline__ Tile next() {
    index = __shfl_sync(~0u, index, 0);
    return decode(index);
  }

  __device__ __forceinline__ void finish() const {
    if (args.counter_slot >= 0 && lane == 0) finish_claims(args, gridDim.x);
  }

 private:
  const FwdArgs& args;
  const int lane;
  int index = blockIdx.x;
  int chunk = 0, tiles_before = 0;  // packed: first segment of the 32 at hand, tiles of all segments before it

  __device__ __forceinline__ Tile decode(int i) {
    const FwdParams& p = args.params;
    Tile t{};
    t.m_block = -1;
    int piece = -1;
    if constexpr (Traits::kSplitsTail) {
      piece = args.tail.piece(i);
      i = args.tail.tile(i);
    }
    if (args.packed) {
      decode_packed(i, t);
    } else if (i < args.num_tiles) {
      DenseOrder{args.order, p.num_heads, args.batches_together}.decode(i, t.m_block, t.batch, t.head);
    }
    if (t.valid()) {
      const SeqInfo s = SeqInfo::of(p, t.batch);
      t.head_kv = t.head / args.group;
      t.seqlen_q = s.seqlen_q;
      t.seqlen_k = s.seqlen_k;
      t.q0 = int(s.q0);
      t.k0 = int(s.k0);
      if constexpr (Traits::kEvenTiles) {
        if (args.even.tall >= 0) {
          const EvenTiles::Rows rows = args.even.rows(t.m_block, piece, Traits::kWarpgroups);
          t.cut(rows.first, rows.count);
        }
      } else if constexpr (Traits::kSplitsTail) {
        constexpr int kFirst = first_piece_rows(Traits::kWarpgroups);
        if (piece >= 0)
          t.cut(t.m_block * Traits::kBlockM + piece * kFirst, piece == 0 ? kFirst : Traits::kBlockM - kFirst);
      }
    }
    return t;
  }

  // Segments in order, each with its own TileOrder. Indices only grow, so the search goes on where the last one ended.
  __device__ __forceinline__ void decode_packed(int i, Tile& t) {
    const FwdParams& p = args.params;
    for (; chunk < p.batch; chunk += 32) {
      const int b = chunk + lane;
      const SeqInfo s = b < p.batch ? SeqInfo::of(p, b) : SeqInfo{0, 0, 0, 0};
      const int m_blocks = ceil_div(s.seqlen_q, Traits::kBlockM);
      int sum = m_blocks * p.num_heads;  // becomes the tiles of this segment and those before it in the chunk
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int below = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += below;
      }
      const unsigned found = __ballot_sync(~0u, i < tiles_before + sum);
      if (found != 0) {
        const int l = __ffs(found) - 1;
        const int blocks = __shfl_sync(~0u, m_blocks, l);
        const int before = tiles_before + __shfl_sync(~0u, sum, l) - blocks * p.num_heads;
        const int keys = __shfl_sync(~0u, s.seqlen_k, l);
        t.batch = chunk + l;
        TileOrder order{blocks, p.num_heads, section_heads(args.order.section, keys, args.group, p.num_heads),
                        args.order.longest_first};
        order.decode(i - before, t.m_block, t.head);
        return;
      }
      tiles_before += __shfl_sync(~0u, sum, 31);
    }
  }
};

}  // namespace flash::sm90
