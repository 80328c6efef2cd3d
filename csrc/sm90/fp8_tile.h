// Tile numbers of the Hopper FP8 forward: the one place where they are chosen.
// The tuner builds other rows with -DFLASH_TUNE_FP8_<NAME>=<number>, without editing files.
#pragma once

#include "fwd_tile.h"

namespace flash::sm90 {

// FwdTile with block_n a multiple of 32, at most 128; the order is Order::kOverlap, and early is all of P or nothing.
struct Fp8Tile : FwdTile {
  int raw_stages;  // units of V that a transposing warp has in shared memory: 4096 bytes each
};

// Contexts of more keys than this are summed in two levels, and so are all of general variants.
inline constexpr int kLongKeys = 16384;

// Registers and shared memory: fwd_tile.h, with 128 bytes for up to 128 columns of Q and K, and 128 bytes of V^T for
// every column of V; and 8 KiB * (raw_stages + 1).
constexpr Fp8Tile fp8_tile_default(int head_dim, bool two_levels) {
  // Two O and 128 keys of S fill the registers of two warpgroups.
  if (two_levels && head_dim <= 128) return {{2, 128, 4, 2, Order::kOverlap, false, 0, 40, 232}, 4};
  if (two_levels) return {{2, 128, 3, 1, Order::kOverlap, false, 0, 40, 232}, 3};
  // Exponentials take twice as long as products: three warpgroups out of step keep the special function units busy.
  if (head_dim <= 64) return {{3, 128, 3, 2, Order::kOverlap, false, 8, 32, 160}, 4};
  if (head_dim <= 128) return {{3, 96, 4, 2, Order::kOverlap, false, 0, 32, 160}, 4};
  if (head_dim <= 192) return {{2, 128, 2, 2, Order::kOverlap, true, 8, 40, 232}, 3};
  return {{2, 128, 2, 2, Order::kOverlap, true, 8, 24, 240}, 3};
}

constexpr Fp8Tile fp8_tile(int head_dim, bool two_levels) {
  Fp8Tile t = fp8_tile_default(head_dim, two_levels);
  if (two_levels) return t;
#ifdef FLASH_TUNE_FP8_WARPGROUPS
  t.warpgroups = FLASH_TUNE_FP8_WARPGROUPS;
  t.producer_registers = 32;
  t.consumer_registers = t.warpgroups == 2 ? 232 : t.warpgroups == 3 ? 160 : 112;
#endif
#ifdef FLASH_TUNE_FP8_BLOCK_N
  t.block_n = FLASH_TUNE_FP8_BLOCK_N;
#endif
#ifdef FLASH_TUNE_FP8_KV_STAGES
  t.kv_stages = FLASH_TUNE_FP8_KV_STAGES;
#endif
#ifdef FLASH_TUNE_FP8_Q_STAGES
  t.q_stages = FLASH_TUNE_FP8_Q_STAGES;
#endif
#ifdef FLASH_TUNE_FP8_EARLY
  t.early = FLASH_TUNE_FP8_EARLY;
#endif
#ifdef FLASH_TUNE_FP8_PINGPONG
  t.pingpong = FLASH_TUNE_FP8_PINGPONG != 0;
#endif
  return t;
}

}  // namespace flash::sm90
