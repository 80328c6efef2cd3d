// Tile numbers of the Hopper forward: the one place where they are chosen.
#pragma once

#include <cstdint>

#include "../attn/tune.h"

namespace flash::sm90 {

// How a consumer warpgroup orders S = Q K^T of block j and O += P V of block j + 1 (blocks run from right to left).
enum class Order : uint8_t {
  kOverlap,  // both issued, softmax of S under the product P V
  kJoint,    // P V then Q K^T issued together, softmax after both: the other warpgroups fill the tensor cores meanwhile
};

struct FwdTile {
  int warpgroups;  // consumers, 64 query rows each: kBlockM = 64 * warpgroups
  int block_n;     // keys of a block; a multiple of 16, 64 in general variants (fwd_traits.cuh)
  int kv_stages;   // blocks of K, and of V, in shared memory
  int q_stages;    // 2: the next tile's Q is loaded while this one's is in use
  Order order;
  bool pingpong;  // warpgroups take turns to issue their products
  int early;      // kOverlap: so many groups of 16 columns of P are computed before the wait for the previous P V
  int producer_registers, consumer_registers;
  int bias_stages = 0;  // general variants: blocks of bias in shared memory, for each warpgroup
};

// Registers: warpgroups * consumer + producer <= 504, 512, 480 for 2, 3, 4 warpgroups, in steps of 8: what the block
// gets at its launch. With more it hangs. Shared memory: (q_stages * 64 * warpgroups + 2 * kv_stages * block_n) *
// head_dim rounded up to 64, times 2 bytes, and 8 KiB * bias_stages * warpgroups: at most 227 KiB.
constexpr FwdTile fwd_tile_default(int head_dim, int head_dim_v, bool general) {
  // As the plain ones, with room for bias in shared memory; with four warpgroups a few numbers spill, which is faster
  // than three.
  if (general && head_dim <= 64) return {4, 64, 4, 2, Order::kJoint, false, 0, 32, 112, 3};
  if (general && head_dim <= 128) return {3, 64, 3, 2, Order::kOverlap, false, 0, 32, 160, 1};
  // Exponentials take as long as products: four warpgroups out of step keep both busy.
  if (head_dim <= 64) return {4, 64, 4, 2, Order::kJoint, false, 0, 32, 112};
  // Three warpgroups out of step hide the softmax without turns; 64 keys leave them room for S, P and O in 160
  // registers.
  if (head_dim <= 128) return {3, 64, 4, 2, Order::kOverlap, false, 0, 32, 160};
  // Q, two K and two V fill the shared memory, so there is one Q, and two warpgroups in turns.
  if (head_dim <= 192 && head_dim_v <= 128) return {2, 128, 2, 1, Order::kOverlap, true, 4, 56, 224};
  if (head_dim <= 192) return {2, 96, 2, 1, Order::kOverlap, true, 2, 56, 224};
  return {2, 64, 2, 1, Order::kOverlap, true, 0, 56, 224, general ? 1 : 0};
}

constexpr FwdTile fwd_tile(int head_dim, int head_dim_v, bool general) {
  FwdTile t = fwd_tile_default(head_dim, head_dim_v, general);
  FLASH_TUNE_FWD;
  return t;
}

}  // namespace flash::sm90
