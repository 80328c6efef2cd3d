// Which tile of which head of which sequence a block of the grid computes.
#pragma once

#include <cstdint>

#include "../attn/seqlen.h"

namespace flash::sm80 {

// Divides by a number that the host knows: on the device a division costs a hundred clocks, and a block has to know its
// tile before it can begin to copy. For numbers below 2^31.
struct Divisor {
  uint32_t divisor, factor, shift;

  FLASH_HD static constexpr Divisor of(uint32_t d) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < d) shift++;
    return {d, uint32_t((((uint64_t{1} << shift) - d) << 32) / d + 1), shift};
  }
  FLASH_HD constexpr uint32_t quotient(uint32_t x) const {
    return uint32_t(((uint64_t{x} * factor >> 32) + x) >> shift);
  }
};

struct Work {
  int tile, head, batch_index;
};

// Which work each block of the grid has.
struct TileOrder {
  bool by_head;
  uint32_t num_heads;
  Divisor per_chunk;  // blocks of the heads that go together
  Divisor together;   // heads; by_head: tiles of a head
  Divisor remaining;  // heads of the last chunk; by_head: heads of a sequence
  Divisor batch;

  // Tiles of one head follow each other, so that blocks that run together share K and V (Q and dout) in L2.
  FLASH_HD static constexpr TileOrder head_by_head(int tiles, int num_heads) {
    return {true, uint32_t(num_heads), {}, Divisor::of(tiles), Divisor::of(num_heads), {}};
  }

  // Tile 0 of all sequences, then tile 1 of all ...: where tiles get shorter, the longest come first and the short ones
  // fill the end. A few heads at a time, about `blocks` blocks: enough to keep a GPU busy for some rounds, and few
  // enough that what they share stays in L2.
  FLASH_HD static constexpr TileOrder tile_by_tile(int tiles, int num_heads, int batch, unsigned blocks) {
    const uint32_t per_head = uint32_t(tiles) * uint32_t(batch), all = uint32_t(num_heads);
    const uint32_t heads = per_head < blocks ? (blocks / per_head < all ? blocks / per_head : all) : 1;
    const uint32_t rest = all % heads;
    return {false,
            all,
            Divisor::of(per_head * heads),
            Divisor::of(heads),
            Divisor::of(rest ? rest : heads),
            Divisor::of(batch)};
  }

  FLASH_HD constexpr Work work_of(uint32_t block) const {
    if (by_head) {
      const uint32_t head = together.quotient(block), sequence = remaining.quotient(head);
      return {int(block - head * together.divisor), int(head - sequence * num_heads), int(sequence)};
    }
    const uint32_t chunk = per_chunk.quotient(block), first_head = chunk * together.divisor;
    const Divisor heads = num_heads - first_head < together.divisor ? remaining : together;
    const uint32_t i = block - chunk * per_chunk.divisor, unit = heads.quotient(i), tile = batch.quotient(unit);
    return {int(tile), int(first_head + i - unit * heads.divisor), int(unit - tile * batch.divisor)};
  }
};

}  // namespace flash::sm80
