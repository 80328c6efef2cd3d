// V^T in shared memory: (head_dim_v, block_n), each row with its keys in the order in which P lies in registers.
#pragma once

#include "../attn/host_device.h"
#include "../attn/seqlen.h"

namespace flash::sm90 {

inline constexpr int kValueRowBytes = 128;  // keys of a block, in the 128-byte swizzle

// Inside 16 keys a row of V^T holds them in another order. The accumulator of S gives a thread, q = lane % 4, keys 2q,
// 2q + 1, 2q + 8, 2q + 9, and the A operand of P V wants places 4q ... 4q + 3 from it: with key 8b + 2q + e at place
// 4q + 2b + e, P has only to be packed.
FLASH_HD constexpr int value_place(int key) { return (key & ~15) | (key & 6) << 1 | (key & 8) >> 2 | (key & 1); }
FLASH_HD constexpr int value_key(int place) {
  return (place & ~15) | (place & 12) >> 1 | (place & 2) << 2 | (place & 1);
}

// Byte offset of 16 places, the chunk-th of a row, in a tile.
FLASH_HD constexpr int value_chunk_offset(int row, int chunk) {
  return row * kValueRowBytes + ((chunk ^ (row % 8)) << 4);
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
  FLASH_HD int first(int batch_index, int64_t k0) const {
    return per_sequence > 0 ? batch_index * per_sequence : int(k0 / block_n) + batch_index;
  }
};

}  // namespace flash::sm90
