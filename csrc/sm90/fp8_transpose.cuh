// V -> V^T in tiles (fp8_layout.h): 8-bit wgmma takes both operands with the reduction dimension contiguous. Each tile
// is needed by all tiles of queries of its heads, so warps that have nothing else to do turn it around once, in the
// order of need, through memory that stays in the L2 cache; the producers wait for what is not ready yet.
#pragma once

#include "../ptx/acquire.cuh"
#include "../ptx/fence.cuh"
#include "../ptx/griddep.cuh"
#include "../ptx/matrix.cuh"
#include "../ptx/tma.cuh"
#include "fp8_traits.cuh"

namespace flash::sm90 {

// The keys of one tile.
struct ValueTile {
  int batch;  // -1: nobody's
  int row;    // of its first key in v
  int keys;   // that exist, may be negative
};

__device__ __forceinline__ ValueTile find_value_tile(const FwdParams& p, const ValueTiles& tiles, int index) {
  int b = 0;
  if (tiles.per_sequence > 0) {
    b = index / tiles.per_sequence;
  } else {  // the last segment that begins at or before the tile
    for (int above = p.batch; above - b > 1;) {
      const int middle = (b + above) / 2;
      (tiles.first(middle, int(SeqInfo::of(p, middle).k0)) <= index ? b : above) = middle;
    }
  }
  const SeqInfo s = SeqInfo::of(p, b);
  const int n_block = index - tiles.first(b, int(s.k0));
  if (n_block < 0 || n_block >= max_of(1, ceil_div(s.seqlen_k, tiles.block_n))) return {-1, 0, 0};
  return {b, int(s.k0) + n_block * tiles.block_n, s.seqlen_k - n_block * tiles.block_n};
}

// A warp that turns units around until none is left. Nothing here waits for another block: whoever has claimed a unit
// finishes it.
template <class Traits>
class Fp8Transposer {
 public:
  __device__ __forceinline__ Fp8Transposer(const Fp8Args& a, const Fp8Smem<Traits>& smem, int w)
      : args(a), raw_full(smem.raw_full(w)), raw(smem.raw(w)), turned(smem.turned(w)), lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    claim();
    uint32_t parity = 0;
    for (bool more = load(); more; parity ^= 1) {
      const int done = tile, part = part_of_tile, columns = columns_of_part(), existing = keys;
      ptx::mbarrier_wait(raw_full, parity);
#pragma unroll 1
      for (int column = 0; column < columns; column += 16) turn(column, existing);
      // Both ways: the copy engine reads what was written, and overwrites what was read.
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) ptx::bulk_store(place(done, part), turned, columns * kUnitKeys);
      more = load();
      if (lane == 0) {
        ptx::bulk_store_wait();
        ptx::fence_proxy_async_global();
        ptx::red_release(args.values_ready + done, 1);
      }
      __syncwarp();
    }
  }

 private:
  const Fp8Args& args;
  const uint32_t raw_full, raw, turned;
  const int lane;
  uint32_t claimed;  // by lane 0
  // The unit at hand.
  int tile, part_of_tile, keys;  // of it that exist

  __device__ __forceinline__ void claim() {
    if (lane == 0) claimed = atomicAdd(args.claimed, 1);
  }

  __device__ __forceinline__ int columns_of_part() const {
    return min_of(Traits::kHeadDimV - part_of_tile % Traits::kPanelsV * 128, 128);
  }
  __device__ __forceinline__ uint8_t* place(int t, int part) const {
    return args.values + int64_t(t) * Traits::kVBytes +
           (part / Traits::kPanelsV * Traits::kHeadDimV + part % Traits::kPanelsV * 128) * kUnitKeys;
  }

  // Starts the copy of the next unit and claims the one behind it. Returns whether there is one.
  __device__ __forceinline__ bool load() {
    while (true) {
      const uint32_t unit = __shfl_sync(~0u, claimed, 0);
      if (unit >= args.value_units.count) return false;
      claim();
      int head, in_head;
      args.value_units.decode(unit / Traits::kUnits, args.params.num_heads_kv, head, in_head);
      const ValueTile found = find_value_tile(args.params, args.tiles<Traits>(), in_head);
      tile = head * int(args.value_tiles.per_head) + in_head;
      if (found.batch < 0) {  // ready all the same: with wrong cu_seqlens somebody may wait for it
        if (lane == 0) ptx::red_release(args.values_ready + tile, 1);
        continue;
      }
      part_of_tile = unit % Traits::kUnits;
      const int key = part_of_tile / Traits::kPanelsV * kUnitKeys;
      keys = found.keys - key;
      if (lane == 0) {
        ptx::mbarrier_arrive_expect_tx(raw_full, Fp8Smem<Traits>::kRawBytes);
        ptx::tma_load(raw, &args.map_v, raw_full, part_of_tile % Traits::kPanelsV * 128, found.row + key,
                      head * args.v_head_step, found.batch * args.v_batch_step);
      }
      return true;
    }
  }

  // 16 columns. ldmatrix transposes pairs of columns; of two registers, one byte permutation makes four keys of the
  // even column, in the order of value_place, and another those of the odd one.
  __device__ __forceinline__ void turn(int column, int existing) const {
    uint32_t pairs[4];  // keys 8i + 2 (lane % 4) + {0, 1}, columns 2 (lane / 4) + {0, 1} of the 16
    ptx::ldmatrix_x4_trans(pairs, raw + lane * 128 + ((column / 16 ^ lane % 8) << 4));
    uint32_t x[4] = {__byte_perm(pairs[0], pairs[1], 0x6420), __byte_perm(pairs[0], pairs[1], 0x7531),
                     __byte_perm(pairs[2], pairs[3], 0x6420), __byte_perm(pairs[2], pairs[3], 0x7531)};
    if (existing < kUnitKeys) {  // what lies behind the sequence may be NaN, and 0 * NaN would reach the result
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] &= keys_below(existing - i / 2 * 16);
    }
    ptx::stmatrix_x4(turned + value_chunk_offset(column + lane % 8 * 2 + lane / 8 % 2, lane / 16), x);
  }

  // Of 16 keys, the bytes of this lane's four that are below `count`.
  __device__ __forceinline__ uint32_t keys_below(int count) const {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (value_key(lane % 4 * 4 + i) < count) mask |= 0xFFu << 8 * i;
    return mask;
  }
};

// What a launch finds at its beginning: no unit claimed, none written. `count` words.
static __global__ void __launch_bounds__(1024) fp8_begin_kernel(uint32_t* words, int64_t count) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the launch before may use the same memory
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) words[i] = 0;
}

}  // namespace flash::sm90
