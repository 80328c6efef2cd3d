// V^T, in shared memory and in the workspace: tiles of block_n keys; a tile (block_n / 32, head_dim_v, 32), each 32
// keys in the order in which P lies in registers.
#pragma once

#include "../attn/host_device.h"
#include "../attn/seqlen.h"
#include "tile_order.h"

namespace flash::sm90 {

inline constexpr int kUnitKeys = 32;  // of one k-step of P V, and of what a warp turns around at once: a unit

// Inside 16 keys a row of V^T holds them in another order. The accumulator of S gives a thread, q = lane % 4, keys 2q,
// 2q + 1, 2q + 8, 2q + 9, and the A operand of P V wants places 4q ... 4q + 3 from it: with key 8b + 2q + e at place
// 4q + 2b + e, P has only to be packed.
FLASH_HD constexpr int value_place(int key) { return (key & ~15) | (key & 6) << 1 | (key & 8) >> 2 | (key & 1); }
FLASH_HD constexpr int value_key(int place) {
  return (place & ~15) | (place & 12) >> 1 | (place & 2) << 2 | (place & 1);
}

// Selector of the byte permutation that makes four places of one column, of two registers as ldmatrix transposes pairs
// of columns: keys 2q, 2q + 1 in the first, 2q + 8, 2q + 9 in the second, of each a byte of column 0 and one of
// column 1.
FLASH_HD constexpr uint32_t value_selector(int column) {
  uint32_t selector = 0;
  for (int place = 0; place < 4; place++) {
    const int key = value_key(place);
    selector |= uint32_t(key / 8 * 4 + key % 2 * 2 + column) << 4 * place;
  }
  return selector;
}

// Byte offset of 16 places, one of two chunks of a row, in 32 keys of a tile: the 32-byte swizzle.
FLASH_HD constexpr int value_chunk_offset(int row, int chunk) {
  return row * kUnitKeys + ((chunk ^ (row / 4 % 2)) << 4);
}

// The tiles of one key head lie one after the other: those of all sequences, each from a tile of its own. A sequence
// without keys has one tile too.
struct ValueTiles {
  int block_n;
  int per_sequence;  // dense: tiles of a sequence; packed: 0
  int64_t per_head;

  FLASH_HD static ValueTiles of(const AttnParams& p, int block_n) {
    if (p.cu_seqlens_k != nullptr) return {block_n, 0, p.total_k / block_n + p.batch};
    const int n = max_of(1, ceil_div(p.seqlen_k, block_n));
    return {block_n, n, int64_t(n) * p.batch};
  }

  // First tile of a sequence whose first key is k0 (dense: 0). Segments are rounded up to whole tiles: at least
  // k / block_n + 1 tiles are between the first one of a segment of k keys and that of the next.
  FLASH_HD constexpr int first(int batch_index, int k0) const {
    return per_sequence > 0 ? batch_index * per_sequence : k0 / block_n + batch_index;
  }
};

// Tiles are made in jobs, in the order in which tiles of queries need them.
struct ValueJobs {
  // Dense: of tiles, from the last of a sequence to its first, several heads together. Packed: m_blocks is 0, and tiles
  // follow each other.
  TileOrder order;
  uint32_t count;

  // `heads` of keys are worked on at a time.
  FLASH_HD static ValueJobs of(const AttnParams& p, const ValueTiles& tiles, int heads, int per_tile) {
    return {{tiles.per_sequence, p.batch * p.num_heads_kv, max_of(1, heads), true},
            uint32_t(tiles.per_head * p.num_heads_kv * per_tile)};
  }

  // The index-th tile: its head and its number there.
  FLASH_HD void decode(int index, int num_heads_kv, int& head, int& tile) const {
    if (order.m_blocks == 0) {
      tile = index / num_heads_kv;
      head = index - tile * num_heads_kv;
      return;
    }
    int n_block, sequence_head;
    order.decode(index, n_block, sequence_head);
    const int batch_index = sequence_head / num_heads_kv;
    head = sequence_head - batch_index * num_heads_kv;
    tile = batch_index * order.m_blocks + n_block;
  }
};

}  // namespace flash::sm90
