// Which keys a query sees, and which blocks of keys (queries) a tile of queries (keys) has to visit.
#pragma once

#include "host_device.h"
#include "seqlen.h"

namespace flash {

// The band mask of one sequence. Query i sees keys key_begin(i) <= j < key_end(i); the alignment is bottom right.
struct Band {
  int seqlen_q, seqlen_k;
  int window_left, window_right;  // -1: unbounded

  FLASH_HD static Band of(const AttnParams& p, const SeqInfo& s) {
    // A huge window cuts nothing; added to a row it must not overflow.
    return {s.seqlen_q, s.seqlen_k, min_of(p.window_left, 1 << 30), min_of(p.window_right, 1 << 30)};
  }

  FLASH_HD int diagonal(int i) const { return i + seqlen_k - seqlen_q; }

  FLASH_HD int key_begin(int i) const { return window_left < 0 ? 0 : max_of(0, diagonal(i) - window_left); }
  FLASH_HD int key_end(int i) const {  // may be <= key_begin: the row sees nothing
    return window_right < 0 ? seqlen_k : min_of(seqlen_k, diagonal(i) + window_right + 1);
  }
  FLASH_HD bool visible(int i, int j) const { return j >= key_begin(i) && j < key_end(i); }

  // The same from the key's side: key j is seen by queries query_begin(j) <= i < query_end(j); none if j does not
  // exist.
  FLASH_HD int query_begin(int j) const {
    return window_right < 0 ? 0 : max_of(0, j - window_right + seqlen_q - seqlen_k);
  }
  FLASH_HD int query_end(int j) const {
    if (j >= seqlen_k) return 0;
    return window_left < 0 ? seqlen_q : min_of(seqlen_q, j + window_left + seqlen_q - seqlen_k + 1);
  }
};

// A range of blocks [begin, end), of which [full_begin, full_end) need no mask. begin <= full_begin <= full_end <= end.
struct BlockRange {
  int begin, end, full_begin, full_end;
  FLASH_HD int count() const { return end - begin; }
  FLASH_HD bool needs_mask(int block) const { return block < full_begin || block >= full_end; }
};

// Blocks of kBlockN keys that the queries row0 ... row0 + rows - 1 see.
FLASH_HD BlockRange key_blocks(const Band& band, int row0, int rows, int block_n) {
  const int last = min_of(row0 + rows, band.seqlen_q) - 1;
  if (last < row0) return {0, 0, 0, 0};
  const int lowest = band.key_begin(row0), highest = band.key_end(last);
  if (highest <= lowest) return {0, 0, 0, 0};
  BlockRange r;
  r.begin = lowest / block_n;
  r.end = ceil_div(highest, block_n);
  r.full_begin = ceil_div(band.key_begin(last), block_n);
  r.full_end = floor_div(band.key_end(row0), block_n);
  r.full_begin = min_of(max_of(r.full_begin, r.begin), r.end);
  r.full_end = min_of(max_of(r.full_end, r.full_begin), r.end);
  return r;
}

// Blocks of kBlockM queries that see one of the keys col0 ... col0 + cols - 1.
FLASH_HD BlockRange query_blocks(const Band& band, int col0, int cols, int block_m) {
  const int last = min_of(col0 + cols, band.seqlen_k) - 1;
  if (last < col0) return {0, 0, 0, 0};
  const int shift = band.seqlen_q - band.seqlen_k;  // query on the diagonal of key j: j + shift
  // Key j is seen by queries i with j - window_right <= diagonal(i) <= j + window_left.
  const int lowest = band.window_right < 0 ? 0 : max_of(0, col0 - band.window_right + shift);
  const int highest = band.window_left < 0 ? band.seqlen_q : min_of(band.seqlen_q, last + band.window_left + shift + 1);
  if (highest <= lowest) return {0, 0, 0, 0};
  BlockRange r;
  r.begin = lowest / block_m;
  r.end = ceil_div(highest, block_m);
  const int all_from = band.window_right < 0 ? 0 : max_of(0, last - band.window_right + shift);
  const int all_to = band.window_left < 0 ? band.seqlen_q : min_of(band.seqlen_q, col0 + band.window_left + shift + 1);
  r.full_begin = ceil_div(all_from, block_m);
  r.full_end = floor_div(all_to, block_m);
  if (col0 + cols > band.seqlen_k) r.full_end = r.full_begin;  // the tile's last keys do not exist: mask everywhere
  r.full_begin = min_of(max_of(r.full_begin, r.begin), r.end);
  r.full_end = min_of(max_of(r.full_end, r.full_begin), r.end);
  return r;
}

}  // namespace flash
