// Which tile of which head of which sequence a block of the grid computes.
#pragma once

#include "../attn/seqlen.h"

namespace flash::sm80 {

// Tiles of one head follow each other, so that blocks that run together share K and V (Q and dout) in L2.
struct Work {
  int tile, head, batch_index;

  FLASH_HD static constexpr Work of(unsigned block, int tiles, int num_heads) {
    return {int(block % unsigned(tiles)), int(block / unsigned(tiles) % unsigned(num_heads)),
            int(block / unsigned(tiles) / unsigned(num_heads))};
  }
  FLASH_HD static constexpr Work last_tile_first(unsigned block, int tiles, int num_heads) {
    const Work w = of(block, tiles, num_heads);
    return {tiles - 1 - w.tile, w.head, w.batch_index};
  }
};

}  // namespace flash::sm80
