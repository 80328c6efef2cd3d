// Which tile of which head of which sequence a block of the grid computes.
#pragma once

#include "../attn/seqlen.h"

namespace flash::sm80 {

struct Work {
  int tile, head, batch_index;

  // Tiles of one head follow each other, so that blocks that run together share K and V (Q and dout) in L2.
  FLASH_HD static constexpr Work of(unsigned block, int tiles, int num_heads) {
    return {int(block % unsigned(tiles)), int(block / unsigned(tiles) % unsigned(num_heads)),
            int(block / unsigned(tiles) / unsigned(num_heads))};
  }

  // Tile 0 of all sequences, then tile 1 of all ...: where tiles get shorter, the longest come first and the short ones
  // fill the end. A few heads at a time, about `together` blocks: enough to keep a GPU busy for some rounds, and few
  // enough that what they share stays in L2.
  FLASH_HD static constexpr Work tile_by_tile(unsigned block, int tiles, int num_heads, int batch, unsigned together) {
    const unsigned per_head = unsigned(tiles) * unsigned(batch);
    const unsigned heads = per_head < together ? together / per_head : 1, chunk = block / (per_head * heads);
    const unsigned first_head = chunk * heads;
    const unsigned heads_here = unsigned(num_heads) - first_head < heads ? unsigned(num_heads) - first_head : heads;
    const unsigned i = block - chunk * (per_head * heads), unit = i / heads_here;
    return {int(unit / unsigned(batch)), int(first_head + i % heads_here), int(unit % unsigned(batch))};
  }
};

}  // namespace flash::sm80
