// What a forward kernel is compiled for, its arguments, its shared memory and its barriers.
#pragma once

#include "../attn/numeric.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tensor_map.h"
#include "fwd_softcap.h"
#include "fwd_tile.h"
#include "option.h"
#include "tile_order.h"

namespace flash::sm90 {

template <DType kDType_, class Dims, bool kGeneral_>
struct FwdTraits {
  static constexpr DType kDType = kDType_;
  using Element = flash::Element<kDType>;
  static constexpr int kHeadDim = Dims::kHeadDim, kHeadDimV = Dims::kHeadDimV;
  static constexpr bool kGeneral = kGeneral_;  // softcap, ALiBi, bias and dropout at run time
  static constexpr Option kOption = Option::kAny;
  static constexpr bool kOptionLoops = kGeneral && kHeadDim <= 128;  // beyond, products hide more

  static constexpr FwdTile kTile = fwd_tile(kHeadDim, kHeadDimV, kGeneral);
  static constexpr int kWarpgroups = kTile.warpgroups;
  static constexpr int kBlockM = 64 * kWarpgroups, kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.kv_stages, kQStages = kTile.q_stages;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kValueLoaders = 0, kValueRows = kBlockN;  // the producer loads V
  // As in tile_order.h. With more warpgroups or fewer it costs as much as it gives.
  static constexpr bool kSplitsTail = !kGeneral && kHeadDim == 128 && kWarpgroups == 3, kEvenTiles = kSplitsTail;

  // A warpgroup may pass over blocks of its tile that only the other warpgroups see. More than these and it would wait
  // for a block whose load waits for the V block that it still holds.
  static constexpr int kMaxSkipLeft = 1, kMaxSkipRight = kStages - 1;

  // Panels of 64 columns, 128 bytes wide (wgmma.cuh).
  static constexpr int kPanelColumns = 64;
  static constexpr int kPanels = ceil_div(kHeadDim, 64), kPanelsV = ceil_div(kHeadDimV, 64);
  static constexpr int kQBytes = 64 * kPanels * 128;  // of one warpgroup
  static constexpr int kKBytes = kBlockN * kPanels * 128, kVBytes = kBlockN * kPanelsV * 128;

  // setmaxnreg moves registers inside what the block got at its launch; a warpgroup that asks for more waits for ever.
  static constexpr int kRegistersAtLaunch = 65536 / kThreads / 8 * 8;
  static_assert(kWarpgroups * kTile.consumer_registers + kTile.producer_registers <=
                (kWarpgroups + 1) * kRegistersAtLaunch);
  static_assert(kBlockN % 16 == 0 && kBlockN <= 256, "keys of a block");
  static_assert(!kGeneral || kBlockN == 64, "a block of bias is one panel, and so many columns share dropout's calls");
  static_assert(!kGeneral || kTile.bias_stages > 0, "bias by the copy engine");
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0);
};

template <class Traits, Option kOption_>
struct WithOption : Traits {
  static constexpr Option kOption = kOption_;
};

struct FwdArgs {
  CUtensorMap map_q, map_k, map_v, map_bias;
  FwdParams params;
  float scale;                  // of what enters the softmax to natural units: fwd_general.cuh says what that is
  float scale_log2;             // to log2 units
  float scores_per_log2;        // its inverse
  TileOrder order;              // of all tiles (DenseOrder); packed: section holds the keys that fit (tile_order.h)
  int num_tiles;                // dense only
  int batches_together = 1;     // dense only (DenseOrder)
  uint32_t dropout_thresholds;  // Dropout::threshold in both halves: registers are short where it is needed
  int counter_slot;             // of the scheduler's counters, -1: tiles are dealt out statically
  int group;                    // query heads of a key head
  bool packed;
  bool zero_v_tail;  // V rows behind a sequence exist and may hold anything
  Option option;     // the only one of the call, or kAny
  bool copies_bias;  // the copy engine brings it; else consumers read it where they need it
  ptx::CoordinateSteps step_q, step_k, step_v, step_bias;
  int bias_row_step;
  float factor_log2;  // of q.k to log2 units, where there is no softcap
  float qk_per_score;
  SoftcapArgs softcap;
  int nothing;     // 0, which the compiler does not know
  TileTail tail;   // where the kernel splits it, dense only
  EvenTiles even;  // where the kernel has them, dense only
};

// A barrier is initialised with the number of its arrivals; "first" is the parity its first wait uses.
//
//   barrier        count            arrives                            waits                         first
//   q_full[s][w]   1 + bytes        producer, TMA                      consumer warpgroup w          0
//   q_empty[s][w]  4                warps of w, after their last Q K^T producer                      1
//   k_full[s]      1 + bytes        producer, TMA                      all consumers                 0
//   k_empty[s]     consumer warps   each warp after Q K^T              producer                      1
//   v_full[s]      1 (+ bytes)      producer, TMA                      all consumers                 0
//   v_empty[s]     consumer warps   each warp after P V                producer                      1
//   v_landed       1 + bytes        producer, TMA                      producer, to zero V's tail    0
//   bias_full[s][w]  1 + bytes      bias producer of w, TMA            consumer warpgroup w          0
//   bias_empty[s][w] 4              warps of w, after reading it       bias producer of w            1
//   tile_full[s]   kWarpgroups      lanes that wrote the tile          consumers, bias producers     0
//   tile_empty[s]  consumer warps   each warp after storing the tile   producer                      1
//                  (+ bias warps)   bias producers, having read it
//
// Named barriers 1 ... kWarpgroups: warpgroup w waits on 1 + w for its turn to issue products, the one before it
// arrives.
template <class Traits>
struct FwdSmem {
  static constexpr int kStages = Traits::kStages, kQStages = Traits::kQStages, kWarpgroups = Traits::kWarpgroups;
  static constexpr int kBiasStages = Traits::kTile.bias_stages, kBiasBytes = 64 * 128;  // of one warpgroup
  static constexpr int kBiasWarps = kWarpgroups < 3 ? kWarpgroups : 3;                  // beside the producer warp
  static constexpr int kTileSlots = 4;

  // What the producer tells the consumers about a tile.
  struct alignas(16) Work {
    Tile tile;
    BlockRange blocks;                     // that are loaded
    BlockRange of_warpgroup[kWarpgroups];  // that each warpgroup visits
  };

  static constexpr int kQ = 0;                                              // (q_stages, warpgroups, panels, 64, 64)
  static constexpr int kK = kQ + kQStages * kWarpgroups * Traits::kQBytes;  // (stages, panels, block_n, 64)
  static constexpr int kV = kK + kStages * Traits::kKBytes;                 // (stages, panels_v, block_n, 64)
  static constexpr int kBias = kV + kStages * Traits::kVBytes;              // (bias_stages, warpgroups, 64, 64)
  static constexpr int kWork = kBias + kBiasStages * kWarpgroups * kBiasBytes;  // (kTileSlots) Work
  static constexpr int kBarriers = kWork + kTileSlots * int(sizeof(Work));
  static constexpr int kQFull = kBarriers, kQEmpty = kQFull + 8 * kQStages * kWarpgroups;
  static constexpr int kKFull = kQEmpty + 8 * kQStages * kWarpgroups, kKEmpty = kKFull + 8 * kStages;
  static constexpr int kVFull = kKEmpty + 8 * kStages, kVEmpty = kVFull + 8 * kStages;
  static constexpr int kVLanded = kVEmpty + 8 * kStages;
  static constexpr int kBiasFull = kVLanded + 8, kBiasEmpty = kBiasFull + 8 * kBiasStages * kWarpgroups;
  static constexpr int kTileFull = kBiasEmpty + 8 * kBiasStages * kWarpgroups, kTileEmpty = kTileFull + 8 * kTileSlots;
  static constexpr int kBytes = kTileEmpty + 8 * kTileSlots;
  static_assert(kBytes <= 232448, "shared memory of a block");

  uint8_t* base;     // 1024-byte aligned
  uint32_t address;  // of base

  __device__ __forceinline__ explicit FwdSmem(uint8_t* p) : base(p), address(ptx::smem_address(p)) {}

  __device__ __forceinline__ uint32_t q(int stage, int w) const {
    return address + kQ + (stage * kWarpgroups + w) * Traits::kQBytes;
  }
  __device__ __forceinline__ uint32_t k(int stage) const { return address + kK + stage * Traits::kKBytes; }
  __device__ __forceinline__ uint32_t v(int stage) const { return address + kV + stage * Traits::kVBytes; }
  __device__ __forceinline__ uint32_t bias(int stage, int w) const {
    return address + kBias + (stage * kWarpgroups + w) * kBiasBytes;
  }
  __device__ __forceinline__ Work& work(int slot) const { return reinterpret_cast<Work*>(base + kWork)[slot]; }

  __device__ __forceinline__ uint32_t q_full(int stage, int w) const {
    return barrier(kQFull, stage * kWarpgroups + w);
  }
  __device__ __forceinline__ uint32_t q_empty(int stage, int w) const {
    return barrier(kQEmpty, stage * kWarpgroups + w);
  }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(kKFull, stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return barrier(kKEmpty, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return barrier(kVFull, stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return barrier(kVEmpty, stage); }
  __device__ __forceinline__ uint32_t v_landed() const { return barrier(kVLanded, 0); }
  __device__ __forceinline__ uint32_t bias_full(int stage, int w) const {
    return barrier(kBiasFull, stage * kWarpgroups + w);
  }
  __device__ __forceinline__ uint32_t bias_empty(int stage, int w) const {
    return barrier(kBiasEmpty, stage * kWarpgroups + w);
  }
  __device__ __forceinline__ uint32_t tile_full(int slot) const { return barrier(kTileFull, slot); }
  __device__ __forceinline__ uint32_t tile_empty(int slot) const { return barrier(kTileEmpty, slot); }

  // By one thread; __syncthreads follows.
  __device__ __forceinline__ void init_barriers(bool copies_bias = false) const {
    for (int i = 0; i < kQStages * kWarpgroups; i++) {
      ptx::mbarrier_init(barrier(kQFull, i), 1);
      ptx::mbarrier_init(barrier(kQEmpty, i), 4);
    }
    for (int i = 0; i < kStages; i++) {
      ptx::mbarrier_init(k_full(i), 1);
      ptx::mbarrier_init(k_empty(i), Traits::kConsumerWarps);
      ptx::mbarrier_init(v_full(i), 1);
      ptx::mbarrier_init(v_empty(i), Traits::kConsumerWarps);
    }
    ptx::mbarrier_init(v_landed(), 1);
    for (int i = 0; i < kBiasStages * kWarpgroups; i++) {
      ptx::mbarrier_init(barrier(kBiasFull, i), 1);
      ptx::mbarrier_init(barrier(kBiasEmpty, i), 4);
    }
    for (int i = 0; i < kTileSlots; i++) {
      ptx::mbarrier_init(tile_full(i), kWarpgroups);
      ptx::mbarrier_init(tile_empty(i),
                         Traits::kConsumerWarps + Traits::kValueLoaders + (copies_bias ? kBiasWarps : 0));
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int offset, int i) const { return address + offset + 8 * i; }
};

// Place in a ring of buffers. The parity flips each time around.
struct RingState {
  int stage = 0;
  uint32_t parity;
  __device__ __forceinline__ explicit RingState(uint32_t first_parity) : parity(first_parity) {}

  template <int kSize>
  __device__ __forceinline__ RingState next() const {
    RingState n = *this;
    n.advance<kSize>();
    return n;
  }
  template <int kSize>
  __device__ __forceinline__ void advance() {
    if (++stage == kSize) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace flash::sm90
