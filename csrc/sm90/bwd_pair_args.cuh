// Types and shared memory of the backward for head_dim 192 and 256, where two thread blocks work as a pair.
#pragma once

#include <type_traits>

#include "bwd_args.cuh"

namespace flash::sm90 {

template <DType kDType_, int kHeadDim_, int kHeadDimV_, bool kGeneral_, Option kOption_ = Option::kAny>
struct BwdPairTraits {
  static constexpr DType kDType = kDType_;
  using T = Element<kDType>;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr Option kOption = kOption_;  // of a general variant
  static constexpr bool kMayBias = kGeneral && may_have(kOption, Option::kBias);
  static constexpr bool kMayDrop = kGeneral && may_have(kOption, Option::kDropout);
  static constexpr BwdTile kTile = bwd_tile(kHeadDim, kHeadDimV);
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kKeys = 64;  // of one thread block; kTile.block_n of the pair
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = 512;
  static constexpr bool kAhead = kTile.joint && !kGeneral;  // the next step's first products with this step's last ones
  // At 192/128 there are registers for dQ of two steps, whose additions then run beside the next products
  // (bwd_pair_deferred_dq.cuh): 7 to 8 % from 4k on.
  static constexpr bool kDeferred = kAhead && kHeadDimV <= 128;
  static constexpr bool kDsShared = kTile.ds_shared;
  static constexpr int kDsStages = kTile.ds_stages;
  static constexpr int kRegistersValues = kTile.registers_main - kTile.registers_moved;
  static constexpr int kRegistersKeys = kTile.registers_main + kTile.registers_moved;
  static constexpr int kPanels = ceil_div(kHeadDim, 64), kPanelsV = ceil_div(kHeadDimV, 64);

  // dO comes and goes in parts of its columns. At 256 there is room for a tile and a half: the half of dV that is
  // computed first is done with its part of dO before the other one.
  using DoutRing = std::conditional_t<(kHeadDimV > 192), PartRing<2, 3>, PartRing<1, kStages>>;
  static constexpr int kPartPanels = kPanelsV / DoutRing::kParts;

  // dQ columns of one thread block. Half of its own K is a part of its K tile where panels allow, else a copy.
  static constexpr int kHalf = kHeadDim / 2, kHalfPanels = ceil_div(kHalf, 64);
  static constexpr bool kHalfIsPanels = kHalf % 64 == 0;

  static constexpr int kPanelBytes = kKeys * 128;  // 64 rows of 64 columns: of K, V, Q, dO, dS alike
  static constexpr int kStatsBytes = kBlockM * 2 * int(sizeof(float));
  static constexpr int kKeptBytes = kMayDrop ? kKeptBytesOfWarpgroup : 0;  // of a stage
  static_assert(kBlockM == 64 && kTile.block_n == 2 * kKeys && kHalf % kTile.dq_columns == 0);
};

// Barriers. "remote": by the other thread block of the pair.
//
//   barrier      arrivals                                   who waits                                   first wait
//   tile_full    1, the query loader                        everybody, for the tile's BwdBlock          parity 0
//   tile_empty   12 warps, loaders of keys and of dO,       query loader                                parity 1
//                the helper, if it has a task
//   claim_full   1, by the query loader of block 0          that of block 1                             parity 0
//   claim_empty  1, by that of block 1                      that of block 0                             parity 1
//   k_full       1 + bytes of K                             warpgroup 0 (S), 2 if it has no own_k       parity 0
//   k_empty      4 or 8 warps of these                      key loader                                  parity 1
//   v_full       1 + bytes of V                             warpgroup 1 (dP)                            parity 0
//   v_empty      4 warps of it                              key loader                                  parity 1
//   half_full    1 + bytes of peer_k, own_k                 warpgroup 2 (dQ)                            parity 0
//   half_empty   4 warps of it                              key loader                                  parity 1
//   q_full       1 + bytes of Q and stats;                  warpgroups 0 (S), 1 (dK)                    parity 0
//                the helper, if it makes bits
//   q_empty      8 warps of these                           query loader, helper                        parity 1
//   dout_full    1 + bytes of a part of dO                  warpgroups 0 (dV), 1 (dP)                   parity 0
//   dout_empty   8 warps of these                           dO loader                                   parity 1
//   bias_full    1 + bytes of bias, copied into the slot    warpgroup 0, instead of slot_empty          parity 0
//   p_full       4 warps of warpgroup 0                     warpgroup 1                                 parity 0
//   ds_full      4 warps of warpgroup 1, or its first one   warpgroup 2, helper                         parity 0
//                for all (kDsShared); the last to arrive
//                sends dS to the other block
//   peer_full    1 + bytes of the other block's dS          warpgroup 2                                 parity 0
//   slot_empty   4 + 4 remote warps of the warpgroups 2,    warpgroup 0, or the loader of bias          parity 1
//                the helper, if it adds to dbias, and
//                4 warps of warpgroup 1 (kDsShared: dK)
template <class Traits>
struct BwdPairSmem {
  uint32_t base;

  static constexpr int kStages = Traits::kStages, kDsStages = Traits::kDsStages, kPanel = Traits::kPanelBytes;
  static constexpr int kK = 0, kV = kK + Traits::kPanels * kPanel;
  static constexpr int kPeerK =
      kV + Traits::kPanelsV * kPanel;  // the other block's keys, this block's half of the columns
  static constexpr int kOwnK = kPeerK + Traits::kHalfPanels * kPanel;  // this block's keys, the same columns
  static constexpr int kQ = kOwnK + (Traits::kHalfIsPanels ? 0 : Traits::kHalfPanels * kPanel);
  static constexpr int kDout = kQ + kStages * Traits::kPanels * kPanel;
  static constexpr int kSlots = kDout + Traits::DoutRing::kPlaces * Traits::kPartPanels * kPanel;
  static constexpr int kPeerDs = kSlots + kDsStages * kPanel;
  static constexpr int kStats = kPeerDs + kDsStages * kPanel;
  static constexpr int kKept = kStats + kStages * Traits::kStatsBytes;
  static constexpr int kBarriers = kKept + kStages * Traits::kKeptBytes;
  static constexpr int kTiles = 2;
  static constexpr int kClaim =
      kBarriers + 8 * (2 * kTiles + 8 + 2 * kStages + 2 * Traits::DoutRing::kPlaces + 5 * kDsStages);
  static constexpr int kBlocks = kClaim + 16;
  static constexpr int kBytes = kBlocks + kTiles * int(sizeof(BwdBlock));
  static_assert(kBytes <= 227 * 1024);

  // [kPanels][64][64]
  __device__ uint32_t k() const { return base + kK; }
  __device__ uint32_t q(int stage) const { return base + kQ + stage * Traits::kPanels * kPanel; }
  // [kPanelsV][64][64]
  __device__ uint32_t v() const { return base + kV; }
  // [kPartPanels][64][64]
  __device__ uint32_t dout(int place) const { return base + kDout + place * Traits::kPartPanels * kPanel; }
  // [kHalfPanels][64][64]
  __device__ uint32_t peer_k() const { return base + kPeerK; }
  __device__ uint32_t own_k() const { return base + kOwnK; }
  // [kBlockM][64]; a slot: bias, P, then dS, which the dQ warpgroup and, with kDsShared, dK read
  __device__ uint32_t slot(int i) const { return base + kSlots + i * kPanel; }
  __device__ uint32_t peer_ds(int i) const { return base + kPeerDs + i * kPanel; }
  // [kBlockM/16][2][16]
  __device__ uint32_t stats(int stage) const { return base + kStats + stage * Traits::kStatsBytes; }
  // [128] words (bwd_kept.cuh)
  __device__ uint32_t kept(int stage) const { return base + kKept + stage * Traits::kKeptBytes; }
  // of block 1: the tile that block 0 has claimed for both
  __device__ uint32_t claim() const { return base + kClaim; }

  __device__ uint32_t tile_full(int tile) const { return base + kBarriers + 8 * (tile % kTiles); }
  __device__ uint32_t tile_empty(int tile) const { return tile_full(tile) + 8 * kTiles; }
  __device__ uint32_t claim_full() const { return base + kBarriers + 16 * kTiles; }
  __device__ uint32_t claim_empty() const { return claim_full() + 8; }
  __device__ uint32_t k_full() const { return claim_full() + 16; }
  __device__ uint32_t k_empty() const { return claim_full() + 24; }
  __device__ uint32_t v_full() const { return claim_full() + 32; }
  __device__ uint32_t v_empty() const { return claim_full() + 40; }
  __device__ uint32_t half_full() const { return claim_full() + 48; }
  __device__ uint32_t half_empty() const { return claim_full() + 56; }
  __device__ uint32_t q_full(int stage) const { return claim_full() + 64 + 8 * stage; }
  __device__ uint32_t q_empty(int stage) const { return q_full(kStages + stage); }
  __device__ uint32_t dout_full(int place) const { return q_full(2 * kStages + place); }
  __device__ uint32_t dout_empty(int place) const { return dout_full(Traits::DoutRing::kPlaces + place); }
  __device__ uint32_t p_full(int i) const { return dout_full(2 * Traits::DoutRing::kPlaces + i); }
  __device__ uint32_t ds_full(int i) const { return p_full(kDsStages + i); }
  __device__ uint32_t peer_full(int i) const { return p_full(2 * kDsStages + i); }
  __device__ uint32_t slot_empty(int i) const { return p_full(3 * kDsStages + i); }
  __device__ uint32_t bias_full(int i) const { return p_full(4 * kDsStages + i); }
};

}  // namespace flash::sm90
