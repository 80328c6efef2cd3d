// Tile numbers of the Hopper backward: one row per pair of head dims, each with its reason.
#pragma once

#include "../attn/host_device.h"
#include "../attn/tune.h"

namespace flash::sm90 {

struct BwdTile {
  int block_m;    // queries of one step
  int block_n;    // keys of a thread block; 64 per main warpgroup, or 64 per block of a cluster pair
  int stages;     // Q and dO tiles in shared memory
  int ds_stages;  // dS tiles between the main warpgroups and the one that computes dQ
  int kv_stages;  // K and V tiles, up to 128; with two the next ones are there before the last ones are done with
  bool joint;     // more products in flight. Up to 128: S and dP together, and P stays in fp32 for dS (otherwise dS
                  // takes P rounded to 16 bit); pairs: the next step's first with this step's last
  bool kv_in_registers;  // K and V as register operands of S and dP: they are read from shared memory once
  int dq_columns;        // columns of dQ that are computed at once: decides its registers (256: of exact sums)
  int registers_main, registers_dq;  // of a thread; two main warpgroups, one for dQ and the producer share 512
  int registers_producer;
  int registers_moved = 0;  // from the first main warpgroup to the second, of a pair
  bool ds_shared = false;   // pairs: dK takes dS from shared memory, where it lies for dQ, instead of from registers
};

constexpr BwdTile bwd_tile_row(int head_dim, int head_dim_v) {
  // 64: accumulators are small, so P keeps fp32, and K and V fit into registers, which frees the shared memory's
  // bandwidth (80 % of the products' time instead of 100 %). Four stages and three dS tiles: 2 % over three and two.
  //
  // 96, 128: S and dP take turns in registers; at 128 dQ comes in pieces of 64 columns, so that 64 registers do.
  //
  // 192, 256: a pair of thread blocks, 64 keys each (bwd_pair_kernel.cuh), whose dK and dV fill the registers. Each
  // adds half of the columns of dQ over 128 keys, so that the L2 cache sees half the additions. Two stages of Q and dO
  // are all that fits, at 256 one and a half of dO for two dS tiles. Joint steps gain 6 to 10 % at 192; at 256 there
  // are no registers for them, and dS in shared memory gains 2 to 4 % (192: - 4 %, 192/128: - 1.5 %).
  //
  // 192/128: a narrower dV leaves registers for dQ of two steps (bwd_pair_deferred_dq.cuh) and room for more dS tiles.
  //
  // The producer has 32 registers, for with 24 it spills.
  //
  //                             m   n stages ds kv joint kv_regs dq main dq producer moved ds_shared
  if (head_dim <= 64) return {64, 128, 4, 3, 2, true, true, 64, 208, 64, 32};
  if (head_dim <= 96) return {64, 128, 3, 2, 1, false, false, 96, 200, 80, 32};
  if (head_dim <= 128) return {64, 128, 3, 2, 1, false, false, 64, 208, 64, 32};
  if (head_dim <= 192 && head_dim_v <= 128) return {64, 128, 2, 4, 1, true, false, 96, 176, 128, 32, 16};
  if (head_dim <= 192) return {64, 128, 2, 2, 1, true, false, 96, 200, 80, 32};
  return {64, 128, 2, 2, 1, false, false, 128, 192, 96, 32, 0, true};
}

constexpr BwdTile bwd_tile(int head_dim, int head_dim_v) {
  BwdTile t = bwd_tile_row(head_dim, head_dim_v);
  FLASH_TUNE_BWD;
  return t;
}

}  // namespace flash::sm90
