// Tile numbers of the Hopper FP8 forward: the one place where they are chosen.
#pragma once

#include "fwd_tile.h"

namespace flash::sm90 {

// FwdTile with block_n a multiple of 32, at most 128; the order is Order::kOverlap, and nothing is early.
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
  if (head_dim <= 64) return {{3, 128, 3, 2, Order::kOverlap, false, 0, 32, 160}, 4};
  if (head_dim <= 128) return {{3, 96, 4, 2, Order::kOverlap, false, 0, 32, 160}, 4};
  if (head_dim <= 192) return {{2, 128, 2, 2, Order::kOverlap, true, 0, 40, 232}, 3};
  return {{2, 128, 2, 2, Order::kOverlap, true, 0, 24, 240}, 3};
}

constexpr Fp8Tile fp8_tile(int head_dim, bool two_levels) {
  Fp8Tile t = fp8_tile_default(head_dim, two_levels);
  if (two_levels) return t;
  FLASH_TUNE_FP8;
  return t;
}

}  // namespace flash::sm90
