// What a transposing warp works on: claims jobs in the order of need and loads their units, ahead of the turning and
// across jobs. Nothing here waits for another block: whoever has claimed a job finishes it.
#pragma once

#include "../ptx/acquire.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/fence.cuh"
#include "fp8_counters.cuh"

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

// By a warp: eight lanes copy a row of 128 bytes, in the 128-byte swizzle. Zeros where there is none.
template <class Traits>
__device__ __forceinline__ void copy_unit(const FwdParams& p, const ValueUnit& unit, uint32_t raw) {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // as in turn_values
  const int row = lane / 8, chunk = lane % 8;
  const bool exists = unit.part % Traits::kPanelsV * 128 + chunk * 16 < p.head_dim_v;
  const int rows = exists ? unit.keys - row : 0;
  const uint32_t to = raw + row * 128 + ((chunk ^ row) << 4);
  const uint8_t* from = unit.source + row * p.v.row + chunk * 16;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    ptx::cp_async_16((i % 2 == 0 ? to : (to ^ 64) + 512) + i / 2 * 1024, from, 4 * i < rows ? 16 : 0);
    from += 4 * p.v.row;
  }
}

// Units of a tile that are claimed and reported as one.
struct ValueJob {
  int tile, head_kv;
  ValueTile keys;  // nobody's is done all the same: with wrong cu_seqlens somebody may wait for it
};

template <class Traits>
__device__ __forceinline__ ValueJob find_job(const Fp8Args& args, uint32_t job) {
  int head_kv, in_head;
  args.value_jobs.decode(job / Traits::kJobs, args.params.num_heads_kv, head_kv, in_head);
  const ValueTile keys = find_value_tile(args.params, args.tiles<Traits>(), in_head);
  return {head_kv * int(args.value_tiles.per_head) + in_head, head_kv, keys};
}

// The i-th unit of the job with that number.
template <class Traits>
__device__ __forceinline__ ValueUnit find_unit(const Fp8Args& args, const ValueJob& found, uint32_t job, int i) {
  const Strided& v = args.params.v;
  const int part = job % Traits::kJobs * Traits::kJobUnits + i;
  const int key = part / Traits::kPanelsV * kUnitKeys, column = part % Traits::kPanelsV * 128;
  const int64_t offset = offset_of(v, args.packed ? 0 : found.keys.batch, found.keys.row, key, found.head_kv) + column;
  return {found.tile, part, found.keys.keys - key, static_cast<const uint8_t*>(v.ptr) + offset};
}

template <class Traits>
__device__ __forceinline__ uint8_t* place_of(const Fp8Args& args, const ValueUnit& unit) {
  return args.values + int64_t(unit.tile) * Traits::kVBytes +
         (unit.part / Traits::kPanelsV * Traits::kHeadDimV + unit.part % Traits::kPanelsV * 128) * kUnitKeys;
}

// Of this unit.
template <class Traits>
__device__ __forceinline__ int columns_of(const ValueUnit& unit) {
  return min_of(Traits::kHeadDimV - unit.part % Traits::kPanelsV * 128, 128);
}

// By a warp: contiguous, from shared to global memory.
__device__ __forceinline__ void store_unit(uint8_t* out, const uint8_t* turned, int bytes) {
  const int lane = threadIdx.x % 32;
  turned += lane * 16;
  out += lane * 16;
#pragma unroll
  for (int i = 0; i < 4096; i += 1024) {
    if (i >= bytes) break;
    uint4 x[2];
#pragma unroll
    for (int j = 0; j < 2; j++) x[j] = *reinterpret_cast<const uint4*>(turned + i + j * 512);
#pragma unroll
    for (int j = 0; j < 2; j++) *reinterpret_cast<uint4*>(out + i + j * 512) = x[j];
  }
}

// By one thread: a job of this tile is done. The copy engine reads it, but had no part in making it, so the fence
// between its view of memory and ours is needed once in a job and not in each unit.
__device__ __forceinline__ void report_job(const Fp8Counters& counters, int tile) {
  ptx::fence_proxy_async_global();
  ptx::red_release(counters.ready() + tile, 1);
}

template <class Traits>
class Fp8UnitLoader {
 public:
  __device__ __forceinline__ Fp8UnitLoader(const Fp8Args& a, const Fp8Smem<Traits>& s, int w)
      : args(a), counters(a), smem(s), turner(w), lane(threadIdx.x % 32) {
    claim();
    if (lane < Smem::kRawStages) smem.unit(turner, lane) = {0, -1, 0, nullptr};
    __syncwarp();
  }

  // Starts the copy of the next unit, as one group of copies; behind the last one there are empty ones.
  __device__ __forceinline__ void load() {
    ValueUnit unit = smem.unit(turner, stage == 0 ? Smem::kRawStages - 1 : stage - 1);  // the one before it
    if ((unit.part + 1) % Traits::kJobUnits == 0) {
      unit = next_job();
    } else if (unit.tile >= 0) {
      unit.part++;
      const bool first_panel = unit.part % Traits::kPanelsV == 0;
      if (first_panel) unit.keys -= kUnitKeys;
      unit.source += first_panel ? kUnitKeys * args.params.v.row - 128 * (Traits::kPanelsV - 1) : 128;
    }
    if (lane == 0) smem.unit(turner, stage) = unit;
    __syncwarp();
    if (unit.tile >= 0) copy_unit<Traits>(args.params, unit, smem.raw(turner, stage));
    ptx::cp_async_commit_group();
    if (++stage == Smem::kRawStages) stage = 0;
  }

 protected:
  using Smem = Fp8Smem<Traits>;

  const Fp8Args& args;
  const Fp8Counters counters;
  const Smem smem;
  const int turner, lane;

 private:
  uint32_t claimed;  // by lane 0
  int stage = 0;

  __device__ __forceinline__ void claim() {
    if (lane == 0) claimed = atomicAdd(counters.claimed(), 1);
  }

  // The first unit of the job that was claimed; claims the one behind it.
  __device__ __forceinline__ ValueUnit next_job() {
    while (true) {
      const uint32_t job = __shfl_sync(~0u, claimed, 0);
      if (job >= args.value_jobs.count) return {-1, 0, 0, nullptr};
      claim();
      const ValueJob found = find_job<Traits>(args, job);
      if (found.keys.batch >= 0) return find_unit<Traits>(args, found, job, 0);
      if (lane == 0) report_job(counters, found.tile);
    }
  }
};

}  // namespace flash::sm90
