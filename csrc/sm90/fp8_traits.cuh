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
  static constexpr int kValueLoaders = 1, kValueRows = kUnitKeys;      // keys of one copy of V
  static constexpr int kMaxSkipLeft = 1, kMaxSkipRight = kStages - 1;  // as in FwdTraits

  // Panels of 128 columns, 128 bytes wide; what a head dim leaves of the last one is zeros that no product reads.
  static constexpr int kPanelColumns = 128;
  static constexpr int kPanels = ceil_div(kHeadDim, 128), kPanelsV = ceil_div(kHeadDimV, 128);
  static constexpr int kQBytes = 64 * kPanels * 128;  // of one warpgroup
  static constexpr int kKBytes = kBlockN * kPanels * 128, kVBytes = kBlockN * kHeadDimV;

  static constexpr int kUnits = kBlockN / kUnitKeys * kPanelsV;  // of a tile of V^T

  static constexpr int kRegistersAtLaunch = 65536 / kThreads / 8 * 8;
  static_assert(kWarpgroups * kTile.consumer_registers + kTile.producer_registers <=
                (kWarpgroups + 1) * kRegistersAtLaunch);
  static_assert(kBlockN % 32 == 0 && kBlockN <= 128, "keys of a block");
  static_assert(kHeadDim % 32 == 0);
};

struct Fp8Args : FwdArgs {
  ValueTiles value_tiles;
  ValueUnits value_units;
  uint8_t* values;         // (num_heads_kv, value_tiles.per_head, head_dim_v, 128)
  uint32_t* values_ready;  // (num_heads_kv, value_tiles.per_head): units of each tile that are written
  uint32_t* claimed;       // units that are claimed

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

// One more barrier than those of fwd_traits.cuh, where the value loader takes the producer's part at v_full and
// v_empty, waits for tile_full and arrives once at tile_empty, and v_landed is not used:
//
//   barrier      count       arrives               waits              first
//   raw_full[w]  1 + bytes   transposer w, TMA     transposer w       0
template <class Traits>
struct Fp8Smem : FwdSmem<Traits> {
  using Base = FwdSmem<Traits>;
  static constexpr int kTransposers = 2, kRawBytes = kUnitKeys * 128;  // one unit
  static constexpr int kRawFull = Base::kBytes;
  static constexpr int kRaw = round_up(kRawFull + 8 * kTransposers, 1024);  // (transposers, 32, 128)
  static constexpr int kTurned = kRaw + kTransposers * kRawBytes;           // (transposers, 128, 32)
  static constexpr int kBytes = kTurned + kTransposers * kRawBytes;
  static_assert(kBytes <= 232448, "shared memory of a block");

  __device__ __forceinline__ explicit Fp8Smem(uint8_t* p) : Base(p) {}

  __device__ __forceinline__ uint32_t raw_full(int w) const { return Base::address + kRawFull + 8 * w; }
  __device__ __forceinline__ uint32_t raw(int w) const { return Base::address + kRaw + w * kRawBytes; }
  __device__ __forceinline__ uint32_t turned(int w) const { return Base::address + kTurned + w * kRawBytes; }

  // By one thread; __syncthreads follows.
  __device__ __forceinline__ void init_barriers() const {
    for (int w = 0; w < kTransposers; w++) ptx::mbarrier_init(raw_full(w), 1);
    Base::init_barriers();
  }
};

}  // namespace flash::sm90
