// In which order the tiles of a call are worked on, and which blocks of keys a tile and its warpgroups visit.
#pragma once

#include <climits>

#include "../attn/mask.h"
#include "../attn/seqlen.h"

namespace flash::sm90 {

// One tile of kBlockM queries of one head.
struct Tile {
  int m_block;  // -1: no more tiles
  int batch, head, head_kv;
  int seqlen_q, seqlen_k;
  int q0, k0;  // first rows in packed tensors

  FLASH_HD bool valid() const { return m_block >= 0; }

  // Leaves `rows` rows at most, from row0 of the sequence on, as a sequence of their own: not where a mask counts rows.
  FLASH_HD constexpr void cut(int row0, int rows) {
    q0 += row0;
    seqlen_q = min_of(seqlen_q - row0, rows);
    m_block = 0;
  }
};

// Order of the tiles of `heads` equally long sequences. Where tiles differ in length (causal), the longest come first
// inside sections of heads whose keys and values fit the L2 cache together; else the tiles of a head follow each other.
struct TileOrder {
  int m_blocks, heads;
  int section;  // heads of a section
  bool longest_first;

  FLASH_HD void decode(int index, int& m_block, int& head) const {
    if (!longest_first) {
      head = index / m_blocks;
      m_block = index - head * m_blocks;
      return;
    }
    const int s = index / (section * m_blocks), first = s * section;
    const int rest = index - first * m_blocks, size = min_of(section, heads - first);
    const int m = rest / size;
    head = first + rest - m * size;
    m_block = m_blocks - 1 - m;
  }
};

// Order of the tiles of a dense call. Batches that share a bias are worked on together, so that memory is read once for
// them: of `together` batches the same tile of the same head, one after the other.
struct DenseOrder {
  TileOrder order;  // of the heads of batch / together batches
  int num_heads, together;

  FLASH_HD void decode(int index, int& m_block, int& batch, int& head) const {
    const int group = index / together;
    int sequence;
    order.decode(group, m_block, sequence);
    const int first = sequence / num_heads;
    batch = first * together + index - group * together;
    head = sequence - first * num_heads;
  }
};

// The last tiles of a call may be dealt out in two pieces, all first pieces before all second ones.
struct TileTail {
  int whole = INT_MAX, split = 0;  // tiles

  FLASH_HD constexpr int count() const { return whole + 2 * split; }
  FLASH_HD constexpr int tile(int index) const { return index < whole + split ? index : index - split; }
  FLASH_HD constexpr int piece(int index) const { return index < whole ? -1 : index >= whole + split; }  // -1: all
};

// Tiles that take the same time end together, and those of the last round leave other blocks without work. If they are
// half as many as blocks, their pieces still are one round, and a piece takes less time than a tile. full: so many
// tiles take as long, since those at the ends of sequences have fewer rows.
FLASH_HD constexpr TileTail split_tail(int tiles, int64_t full, int blocks) {
  const int rest = int(full % blocks);
  return 2 * rest <= blocks ? TileTail{tiles - rest, rest} : TileTail{tiles, 0};
}

// Rows of the first of a tile's two pieces.
FLASH_HD constexpr int first_piece_rows(int warpgroups) { return 64 * ceil_div(warpgroups, 2); }

// Of tiles of 64 rows a warpgroup, in heads of seqlen_q rows: none where all second pieces would be without rows.
FLASH_HD constexpr TileTail split_tail(int tiles, int64_t heads, int seqlen_q, int warpgroups, int blocks) {
  if (seqlen_q <= first_piece_rows(warpgroups)) return {tiles, 0};
  const int block_m = 64 * warpgroups;
  return split_tail(tiles, (heads * seqlen_q + block_m - 1) / block_m, blocks);
}

// Tiles of a sequence that differ by 64 rows at most, with no mask: the first `tall` keep all warpgroups busy, the
// others all but one. A tile for one warpgroup alone takes three quarters of the time of a full one.
struct EvenTiles {
  int tall;  // -1: every tile but the last is full

  struct Rows {
    int first, count;
  };

  FLASH_HD constexpr static EvenTiles of(int seqlen_q, int warpgroups) {
    const int units = ceil_div(seqlen_q, 64), tiles = ceil_div(units, warpgroups);
    return {max_of(-1, units - tiles * (warpgroups - 1))};
  }

  // Of a tile or (TileTail) a piece of it. A sequence may end before.
  FLASH_HD constexpr Rows rows(int m_block, int piece, int warpgroups) const {
    const int first = m_block * warpgroups - max_of(0, m_block - tall), units = warpgroups - (m_block >= tall);
    const int half = (units + 1) / 2;
    if (piece < 0) return {64 * first, 64 * units};
    return piece == 0 ? Rows{64 * first, 64 * half} : Rows{64 * (first + half), 64 * (units - half)};
  }
};

// As many batches as leave their keys and values room in the L2 cache, which the bias passes through.
FLASH_HD int batches_together(int64_t l2_bytes, int64_t bytes_per_kv_head, int batch) {
  int together = batch;
  while (together > 1 && (batch % together != 0 || together * bytes_per_kv_head > l2_bytes / 2)) together--;
  return together;
}

// Where a sequence has so few tiles, sections hold few heads: the first tiles of many heads at once would read keys and
// values faster than global memory gives them, and the tiles behind them nothing.
inline constexpr int kFewTiles = 3, kTilesOfShortSection = 24;

FLASH_HD int short_section(const TileOrder& order, int group) {
  if (order.m_blocks > kFewTiles) return order.section;
  return min_of(order.section, ceil_div(kTilesOfShortSection, order.m_blocks * group) * group);
}

// Heads of a section: grouped heads share their keys and values.
FLASH_HD int section_heads(int64_t l2_bytes, int64_t bytes_per_kv_head, int group, int heads) {
  const int64_t fit = l2_bytes / (bytes_per_kv_head > 0 ? bytes_per_kv_head : 1);
  return int(fit < 1 ? min_of(group, heads) : fit * group < heads ? fit * group : heads);
}

// Blocks that the producer loads for a tile: never none, so that the pipeline has no special case. Where a tile sees no
// key, one masked block is visited; its V rows are zeroed.
FLASH_HD BlockRange tile_blocks(const Band& band, int row0, int rows, int block_n) {
  const BlockRange r = key_blocks(band, row0, rows, block_n);
  return r.count() > 0 ? r : BlockRange{0, 1, 0, 0};
}

struct SkipLimits {
  int left, right;
};

// Blocks that the 64 queries of one warpgroup visit, inside those of its tile; at most `skip` fewer on either side, if
// it has rows.
FLASH_HD BlockRange warpgroup_blocks(const Band& band, const BlockRange& tile, int row0, int block_n, SkipLimits skip) {
  if (row0 >= band.seqlen_q) return {tile.end - 1, tile.end, tile.end - 1, tile.end};  // no rows: as little as can be
  BlockRange r = key_blocks(band, row0, 64, block_n);
  if (r.count() == 0) return {tile.begin, tile.end, tile.begin, tile.begin};
  r.begin = max_of(tile.begin, min_of(r.begin, tile.begin + skip.left));
  r.end = min_of(tile.end, max_of(r.end, tile.end - skip.right));
  return r;
}

}  // namespace flash::sm90
