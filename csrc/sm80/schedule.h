// What the host works out for all blocks of a main kernel.
#pragma once

#include "work.h"

namespace flash::sm80 {

struct FwdSchedule {
  TileOrder order;
  int last_tile;  // where tiles go from the last to the first, which see most keys of a causal mask; else -1
  Divisor group;  // query heads of a kv head

  static FwdSchedule of(const FwdParams& p, int tiles, int blocks_per_sm) {
    // Measured on 132 multiprocessors: two rounds where each block has one to itself, eight where two share it.
    const unsigned together = blocks_per_sm == 1 ? 256 : 2048;
    const Divisor group = Divisor::of(p.num_heads / p.num_heads_kv);
    if (p.window_left >= 0 || p.window_right < 0) return {TileOrder::head_by_head(tiles, p.num_heads), -1, group};
    return {TileOrder::tile_by_tile(tiles, p.num_heads, p.batch, together), tiles - 1, group};
  }
  FLASH_HD Work work_of(unsigned block) const {
    Work work = order.work_of(block);
    if (last_tile >= 0) work.tile = last_tile - work.tile;
    return work;
  }
};

// Heads count (kv head, which of the blocks that share it).
struct BwdSchedule {
  TileOrder order;
  int tiles_from_end;  // tiles of keys, where a tile's number counts as if every sequence ended with the last one; else
                       // 0
  int stages;          // of queries: 2, or 1 where shared memory is short
  Divisor splits;      // blocks that share a tile of keys
  int num_heads;       // query heads of a block

  static BwdSchedule of(const BwdParams& p, int tiles, int splits, int stages) {
    const int heads = p.num_heads_kv * splits, num_heads = p.num_heads / heads;
    const Divisor shares = Divisor::of(splits);
    if (p.window_left >= 0 || p.window_right < 0)
      return {TileOrder::head_by_head(tiles, heads), 0, stages, shares, num_heads};
    // Early keys are seen by most queries of a causal mask: the longest tiles come first, which are as far from the end
    // in sequences of any length.
    return {TileOrder::tile_by_tile(tiles, heads, p.batch, 512), tiles, stages, shares, num_heads};
  }
};

}  // namespace flash::sm80
