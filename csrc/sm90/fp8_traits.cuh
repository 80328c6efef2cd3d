// What an FP8 forward kernel is compiled for, its arguments and its shared memory. Barriers: fwd_traits.cuh.
#pragma once

#include "../ptx/fence.cuh"
#include "fp8_layout.h"
#include "fp8_tile.h"
#include "fwd_traits.cuh"

namespace flash::sm90 {

struct Fp8Args;

template <class Dims, bool kGeneral_, bool kTwoLevels_>
struct Fp8Traits {
  using Args = Fp8Args;
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
  static constexpr int kRawStages = kTile.raw_stages, kTransposers = kRawStages > 0 ? 3 : 0;
  static constexpr int kMaxSkipLeft = 1, kMaxSkipRight = kStages - 1;  // as in FwdTraits

  // Panels of 128 columns, 128 bytes wide; what a head dim leaves of the last one is zeros that no product reads.
  static constexpr int kPanelColumns = 128;
  static constexpr int kPanels = ceil_div(kHeadDim, 128), kPanelsV = ceil_div(kHeadDimV, 128);
  static constexpr int kQBytes = 64 * kPanels * 128;  // of one warpgroup
  static constexpr int kKBytes = kBlockN * kPanels * 128, kVBytes = kHeadDimV * kValueRowBytes;
  static constexpr int kRawBytes = kBlockN * kPanelsV * 128;  // V as it comes

  static constexpr int kRegistersAtLaunch = 65536 / kThreads / 8 * 8;
  static_assert(kWarpgroups * kTile.consumer_registers + kTile.producer_registers <=
                (kWarpgroups + 1) * kRegistersAtLaunch);
  static_assert(kBlockN % 32 == 0 && kBlockN <= kValueRowBytes, "keys of a block");
  static_assert(kHeadDim % 32 == 0);
};

struct Fp8Args : FwdArgs {
  ValueTiles value_tiles;
  const uint8_t* values;  // (num_heads_kv, value_tiles.per_head, head_dim_v, 128)
  int value_tile_bytes;

  __device__ __forceinline__ const uint8_t* value_tile(const Tile& t, int n_block) const {
    const int64_t tile = t.head_kv * value_tiles.per_head + value_tiles.first(t.batch, t.k0) + n_block;
    return values + tile * value_tile_bytes;
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

// Barriers besides those of fwd_traits.cuh, whose v_full the transposers arrive on:
//
//   barrier        count            arrives                            waits                         first
//   raw_full[s]    1 + bytes        producer, TMA                      transposers                   0
//   raw_empty[s]   transposers      each warp, the block read          producer                      1
template <class Traits>
struct Fp8Smem : FwdSmem<Traits> {
  using Base = FwdSmem<Traits>;
  static constexpr int kRawStages = Traits::kRawStages;
  static constexpr int kRawFull = Base::kBytes, kRawEmpty = kRawFull + 8 * kRawStages;
  static constexpr int kOnes =
      round_up(kRawEmpty + 8 * kRawStages, 1024);  // (8, 128) of 1: its product with P is P's row sums
  static constexpr int kRaw = kOnes + 1024;        // (raw_stages, panels_v, block_n, 128)
  static constexpr int kBytes = kRaw + kRawStages * Traits::kRawBytes;
  static_assert(kBytes <= 232448, "shared memory of a block");

  __device__ __forceinline__ explicit Fp8Smem(uint8_t* p) : Base(p) {}
  __device__ __forceinline__ explicit Fp8Smem(const Base& b) : Base(b) {}

  __device__ __forceinline__ uint32_t ones() const { return Base::address + kOnes; }
  __device__ __forceinline__ uint32_t raw(int stage) const { return Base::address + kRaw + stage * Traits::kRawBytes; }
  __device__ __forceinline__ uint32_t raw_full(int stage) const { return Base::address + kRawFull + 8 * stage; }
  __device__ __forceinline__ uint32_t raw_empty(int stage) const { return Base::address + kRawEmpty + 8 * stage; }

  // By all threads; __syncthreads follows.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kRawStages; i++) {
        ptx::mbarrier_init(raw_full(i), 1);
        ptx::mbarrier_init(raw_empty(i), Traits::kTransposers);
      }
      Base::init_barriers();
    }
    constexpr uint32_t kFourOnes = 0x38383838;  // e4m3
    for (int i = threadIdx.x; i < 256; i += blockDim.x) reinterpret_cast<uint32_t*>(Base::base + kOnes)[i] = kFourOnes;
    ptx::fence_proxy_async();
  }
};

}  // namespace flash::sm90
