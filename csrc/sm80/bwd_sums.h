// Where fp32 sums lie in the workspace while blocks add to them: dq's, and dk's and dv's where blocks share a tile of
// keys. The sums of a tile are stored in the order of the accumulator fragments of the warps that add to them, so that
// every addition of a warp covers whole 128-byte lines.
#pragma once

#include "../attn/mask.h"

namespace flash::sm80 {

// Tiles of kBlock rows, numbered over the batch; each packed sequence starts at a tile of its own.
template <int kBlock>
struct TileIndex {
  bool packed;
  int tiles, batch;  // tiles of a dense sequence
  int64_t total;     // packed rows

  FLASH_HD static TileIndex of_queries(const AttnParams& p) {
    return {p.cu_seqlens_q != nullptr, ceil_div(p.seqlen_q, kBlock), p.batch, p.total_q};
  }
  FLASH_HD static TileIndex of_keys(const AttnParams& p) {
    return {p.cu_seqlens_k != nullptr, ceil_div(p.seqlen_k, kBlock), p.batch, p.total_k};
  }
  // Tile `tile` of a sequence whose first packed row is `first_row`.
  FLASH_HD int64_t index(int batch_index, int64_t first_row, int tile) const {
    return packed ? first_row / kBlock + batch_index + tile : int64_t(batch_index) * tiles + tile;
  }
  FLASH_HD int64_t count() const { return packed ? total / kBlock + batch + 1 : int64_t(batch) * tiles; }
};

// How the warps of a block share dq (kBlockM, kHeadDim): kRowWarps x kColWarps pieces of 32 rows, kCols columns at a
// time.
template <int kBlockM, int kHeadDim, int kWarps, int kCols_>
struct DqPieces {
  static constexpr int kRowWarps = kBlockM / 32, kColWarps = kWarps / kRowWarps;
  static constexpr int kColsPerWarp = kHeadDim / kColWarps;
  static constexpr int kCols = kCols_;
  static constexpr int kPieces = kColsPerWarp / kCols;
  static_assert(kRowWarps * kColWarps == kWarps && kColsPerWarp * kColWarps == kHeadDim &&
                kPieces * kCols == kColsPerWarp && kCols % 16 == 0);
  static constexpr int kFloats = kBlockM * kHeadDim;

  FLASH_HD static constexpr int row0(int warp) { return warp % kRowWarps * 32; }
  FLASH_HD static constexpr int col0(int warp, int piece) { return warp / kRowWarps * kColsPerWarp + piece * kCols; }
  // Offset of the 128 floats of a warp's fragment (m, n) of a piece.
  FLASH_HD static constexpr int fragment(int warp, int piece, int m, int n) {
    return (((warp * kPieces + piece) * 2 + m) * (kCols / 8) + n) * 128;
  }
};

// deterministic: blocks of keys add to a tile of queries in a fixed order, the first block that sees it first. That is
// the order in which they start; they go through the queries from the last, which all keys of a causal mask see.
FLASH_HD int dq_turn(const Band& band, int row0, int block_m, int key_block, int block_n) {
  return key_block - key_blocks(band, row0, block_m, block_n).begin;
}

// Blocks that share a tile of keys, each with its part of the group's query heads: as few as give a GPU enough to do.
FLASH_HD int head_splits(const AttnParams& p, int block_n) {
  constexpr int64_t kEnoughBlocks = 512;
  const int group = p.num_heads_kv > 0 ? p.num_heads / p.num_heads_kv : 1;
  const int64_t blocks = int64_t(ceil_div(p.seqlen_k, block_n)) * p.num_heads_kv * p.batch;
  for (int splits = 1; splits < group; splits++)
    if (group % splits == 0 && splits * blocks >= kEnoughBlocks) return splits;
  return max_of(group, 1);
}

}  // namespace flash::sm80
