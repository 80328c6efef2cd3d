// Where the fp32 sums of dq lie in the workspace while blocks of keys add to them.
#pragma once

#include "../attn/mask.h"

namespace flash::sm80 {

// The sums of a tile of kBlockM queries of a head are stored in the order of the accumulator fragments of the warps
// that add to them, so that every addition of a warp covers whole 128-byte lines. Tiles are numbered over the batch;
// each packed sequence starts at a tile of its own.
template <int kBlockM>
struct DqTiles {
  // Tile `tile` of a sequence whose first packed row is q0.
  FLASH_HD static int64_t index(const AttnParams& p, int batch_index, int64_t q0, int tile) {
    if (p.cu_seqlens_q == nullptr) return int64_t(batch_index) * ceil_div(p.seqlen_q, kBlockM) + tile;
    return q0 / kBlockM + batch_index + tile;
  }
  FLASH_HD static int64_t count(const AttnParams& p) {
    if (p.cu_seqlens_q == nullptr) return int64_t(p.batch) * ceil_div(p.seqlen_q, kBlockM);
    return p.total_q / kBlockM + p.batch + 1;
  }
};

// How the warps of a block share dq (kBlockM, kHeadDim): kRowWarps x kColWarps pieces of 32 rows, kCols columns at a
// time.
template <int kBlockM, int kHeadDim, int kWarps>
struct DqPieces {
  static constexpr int kRowWarps = kBlockM / 32, kColWarps = kWarps / kRowWarps;
  static constexpr int kColsPerWarp = kHeadDim / kColWarps;
  static constexpr int kCols = kColsPerWarp % 32 == 0 ? 32 : 16;
  static constexpr int kPieces = kColsPerWarp / kCols;
  static_assert(kRowWarps * kColWarps == kWarps && kColsPerWarp * kColWarps == kHeadDim &&
                kPieces * kCols == kColsPerWarp);
  static constexpr int kFloats = kBlockM * kHeadDim;

  FLASH_HD static constexpr int row0(int warp) { return warp % kRowWarps * 32; }
  FLASH_HD static constexpr int col0(int warp, int piece) { return warp / kRowWarps * kColsPerWarp + piece * kCols; }
  // Offset of the 128 floats of a warp's fragment (m, n) of a piece.
  FLASH_HD static constexpr int fragment(int warp, int piece, int m, int n) {
    return (((warp * kPieces + piece) * 2 + m) * (kCols / 8) + n) * 128;
  }
};

// deterministic: blocks of keys add to a tile of queries in a fixed order, the last block that sees it first. In a
// causal mask that is the order in which they get there, if blocks start from the last.
FLASH_HD int dq_turn(const Band& band, int row0, int block_m, int key_block, int block_n) {
  return key_blocks(band, row0, block_m, block_n).end - 1 - key_block;
}

}  // namespace flash::sm80
