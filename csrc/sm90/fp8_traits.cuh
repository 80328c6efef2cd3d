// What an FP8 forward kernel is compiled for, its arguments and its shared memory. Barriers: fwd_traits.cuh.
#pragma once

#include "fp8_layout.h"
#include "fp8_tile.h"
#include "fwd_traits.cuh"

namespace flash::sm90 {

template <class Dims, bool kGeneral_, bool kTwoLevels_>
struct Fp8Traits {
  static constexpr DType kDType = DType::kE4M3;
  static constexpr int kHeadDim = Dims::kHeadDim, kHeadDimV = Dims::kHeadDimV;
  static constexpr bool kGeneral = kGeneral_;  // softcap, sinks and any softmax_scale, at run time

  static constexpr bool kTwoLevels = kTwoLevels_;  // O is summed up in two levels (fp8_totals.cuh)

  static constexpr Fp8Tile kTile = fp8_tile(kHeadDim, kTwoLevels);
  static constexpr int kWarpgroups = kTile.warpgroups;
  static constexpr int kBlockM = 64 * kWarpgroups, kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.kv_stages, kQStages = kTile.q_stages;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kValueLoaders = 1, kTransposers = 2;            // warps
  static constexpr int kValueRows = kUnitKeys;                         // keys of one copy of V
  static constexpr bool kSplitsTail = true, kEvenTiles = false;        // tile_order.h
  static constexpr int kMaxSkipLeft = 1, kMaxSkipRight = kStages - 1;  // as in FwdTraits

  // Panels of 128 columns, 128 bytes wide; what a head dim leaves of the last one is zeros that no product reads.
  static constexpr int kPanelColumns = 128;
  static constexpr int kPanels = ceil_div(kHeadDim, 128), kPanelsV = ceil_div(kHeadDimV, 128);
  static constexpr int kQBytes = 64 * kPanels * 128;  // of one warpgroup
  static constexpr int kKBytes = kBlockN * kPanels * 128, kVBytes = kBlockN * kHeadDimV;

  // A tile of V^T is made in jobs of so many units, claimed and reported as one: both take longer than to turn a unit.
  static constexpr int kUnits = kBlockN / kUnitKeys * kPanelsV, kJobUnits = kUnits % 4 == 0 ? 4 : kUnits;
  static constexpr int kJobs = kUnits / kJobUnits;
  static_assert(kJobUnits <= 4, "a warpgroup takes a job at the kernel's start");

  static constexpr int kRegistersAtLaunch = 65536 / kThreads / 8 * 8;
  static_assert(kWarpgroups * kTile.consumer_registers + kTile.producer_registers <=
                (kWarpgroups + 1) * kRegistersAtLaunch);
  static_assert(kBlockN % 32 == 0 && kBlockN <= 128, "keys of a block");
  static_assert(kTile.order == Order::kOverlap && kTile.early == 0);
  static_assert(kHeadDim % 32 == 0);
};

struct Fp8Args : FwdArgs {
  ValueTiles value_tiles;
  ValueJobs value_jobs;
  uint8_t* values;           // (num_heads_kv, value_tiles.per_head, block_n / 32, head_dim_v, 32)
  uint32_t* values_ready;    // (num_heads_kv, value_tiles.per_head): jobs of each tile that are done; or nullptr
  uint32_t* values_claimed;  // jobs that are claimed

  // With a constant block_n, by which is divided.
  template <class Traits>
  __device__ __forceinline__ ValueTiles tiles() const {
    return {Traits::kBlockN, value_tiles.per_sequence, value_tiles.per_head};
  }
};

// Factors of a tile's stored numbers.
struct Descales {
  float qk, v;

  __device__ __forceinline__ static Descales of(const FwdParams& p, const Tile& t) {
    return {load(p.q_descale, p.q_descale_strides, t) * load(p.k_descale, p.k_descale_strides, t),
            load(p.v_descale, p.v_descale_strides, t)};
  }

 private:
  __device__ __forceinline__ static float load(const float* x, const int64_t (&strides)[2], const Tile& t) {
    return x == nullptr ? 1.f : __ldg(x + t.batch * strides[0] + t.head_kv * strides[1]);
  }
};

// 32 keys of up to 128 columns of V, on their way through shared memory.
struct alignas(8) ValueUnit {
  int tile;  // -1: no more units
  int part;  // of the tile
  int keys;  // that exist, may be negative
  const uint8_t* source;
};

// Barriers are those of fwd_traits.cuh, where the value loader takes the producer's part at v_full and v_empty, waits
// for tile_full and arrives once at tile_empty, and v_landed is not used; and named barriers of the kernel's start
// (fp8_first_values.cuh): 4 + warpgroup between the warps of one, 8 until V's buffers are free for the value loader, 9
// until the consumers have claimed and the transposers may.
template <class Traits>
struct Fp8Smem : FwdSmem<Traits> {
  using Base = FwdSmem<Traits>;
  static constexpr int kTransposers = Traits::kTransposers, kRawStages = Traits::kTile.raw_stages;
  static constexpr int kRawBytes = kUnitKeys * 128;
  static constexpr int kUnits = round_up(Base::kBytes, 16);  // (transposers, raw_stages) ValueUnit
  static constexpr int kUnitBytes = kTransposers * kRawStages * int(sizeof(ValueUnit));
  static constexpr int kFirstJobs = kUnits + kUnitBytes;  // (warpgroups) uint32_t
  static constexpr int kRaw = round_up(kFirstJobs + 4 * Traits::kWarpgroups, 1024);
  static constexpr int kTurned = kRaw + kTransposers * kRawStages * kRawBytes;
  static constexpr int kEnd = kTurned + kTransposers * kRawBytes;
  // (consumer warps, 32, 128) bytes at the kernel's start: where V will be, or behind everything.
  static constexpr int kFirstBytes = Traits::kConsumerWarps * kRawBytes;
  static constexpr bool kFirstInV = kFirstBytes <= Traits::kStages * Traits::kVBytes;
  static constexpr int kFirst = kFirstInV ? Base::kV : kEnd, kBytes = kFirstInV ? kEnd : kEnd + kFirstBytes;
  static_assert(kBytes <= 232448, "shared memory of a block");

  __device__ __forceinline__ explicit Fp8Smem(uint8_t* p) : Base(p) {}

  __device__ __forceinline__ ValueUnit& unit(int w, int stage) const {
    return reinterpret_cast<ValueUnit*>(Base::base + kUnits)[w * kRawStages + stage];
  }
  __device__ __forceinline__ uint32_t& first_job(int w) const {
    return reinterpret_cast<uint32_t*>(Base::base + kFirstJobs)[w];
  }
  // (32, 128) bytes, in the 128-byte swizzle.
  __device__ __forceinline__ uint32_t raw(int w, int stage) const {
    return Base::address + kRaw + (w * kRawStages + stage) * kRawBytes;
  }
  // (128, 32) bytes, as in a tile.
  __device__ __forceinline__ uint32_t turned(int w) const { return Base::address + kTurned + w * kRawBytes; }
};

}  // namespace flash::sm90
