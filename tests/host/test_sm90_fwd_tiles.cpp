// Tile order and block ranges of the sm_90 forward.
#include <array>
#include <set>
#include <utility>
#include <vector>

#include "expect.h"
#include "instances.h"
#include "sm90/fwd_tile.h"
#include "sm90/tile_order.h"

using namespace flash;
using namespace flash::sm90;

namespace {

// Every tile exactly once; long tiles before short ones inside a section.
void test_order(const TileOrder& order) {
  std::set<std::pair<int, int>> seen;
  int last_m = 0, last_section = -1;
  for (int i = 0; i < order.m_blocks * order.heads; i++) {
    int m, head;
    order.decode(i, m, head);
    EXPECT(m >= 0 && m < order.m_blocks && head >= 0 && head < order.heads, "tile ", i, ": ", m, " ", head);
    EXPECT(seen.insert({m, head}).second, "tile ", i, " twice: ", m, " ", head);
    if (order.longest_first) {
      const int section = head / order.section;
      EXPECT(section >= last_section, "sections in order");
      EXPECT(section > last_section || m <= last_m, "longest first");
      last_section = section;
    } else {
      EXPECT(head == i / order.m_blocks, "a head's tiles follow each other");
    }
    last_m = m;
  }
}

// Every tile exactly once; batches that belong together have the same tile one after the other.
void test_together(int batch, int num_heads, int together, bool longest_first) {
  const int m_blocks = 3;
  const DenseOrder order{{m_blocks, batch / together * num_heads, 2, longest_first}, num_heads, together};
  std::set<std::array<int, 3>> seen;
  for (int i = 0; i < m_blocks * batch * num_heads; i++) {
    int m, b, head, first_m, first_b, first_head;
    order.decode(i, m, b, head);
    order.decode(i / together * together, first_m, first_b, first_head);
    EXPECT(m >= 0 && m < m_blocks && b >= 0 && b < batch && head >= 0 && head < num_heads, "tile ", i);
    EXPECT(seen.insert({m, b, head}).second, "tile ", i, " twice: ", m, " ", b, " ", head);
    EXPECT(m == first_m && head == first_head && b == first_b + i % together, "tile ", i, " of ", together);
  }
}

// Every row exactly once, whole tiles first; pieces only where they fit one round and second ones can have rows.
void test_tail(int heads, int seqlen_q, int warpgroups, int blocks) {
  const int block_m = 64 * warpgroups, first = first_piece_rows(warpgroups), m_blocks = ceil_div(seqlen_q, block_m);
  const TileTail tail = split_tail(heads * m_blocks, heads, seqlen_q, warpgroups, blocks);
  EXPECT(tail.split == 0 || seqlen_q > first, "second pieces have rows");
  EXPECT(tail.whole >= 0 && 2 * tail.split <= blocks && tail.whole + tail.split == heads * m_blocks, "all tiles");
  EXPECT(tail.tile(tail.count()) == heads * m_blocks, "behind the last");
  std::vector<int> seen(heads * seqlen_q);
  for (int i = 0; i < tail.count(); i++) {
    const int index = tail.tile(i), piece = tail.piece(i), head = index / m_blocks;
    EXPECT((piece < 0) == (i < tail.whole) && piece <= 1, "pieces behind whole tiles");
    Tile t{index - head * m_blocks, 0, head, head, seqlen_q, 0, 7, 0};
    if (piece >= 0) t.cut(t.m_block * block_m + piece * first, piece == 0 ? first : block_m - first);
    for (int row = t.m_block * block_m; row < min_of(t.seqlen_q, (t.m_block + 1) * block_m); row++)
      seen[head * seqlen_q + t.q0 - 7 + row]++;
  }
  for (const int n : seen) EXPECT(n == 1, "a row ", n, " times");
}

void test_batches_together() {
  EXPECT(batches_together(1 << 20, 1 << 17, 4) == 4, "half of the cache");
  EXPECT(batches_together(1 << 20, 1 << 17, 16) == 4, "half of the cache");
  EXPECT(batches_together(1 << 20, 1 << 17, 6) == 3, "equal groups");
  EXPECT(batches_together(1 << 20, 1 << 20, 4) == 1, "too large");
  EXPECT(batches_together(1 << 20, 0, 7) == 7, "no keys");
  for (const bool longest_first : {false, true})
    for (const int together : {1, 2, 3, 6}) test_together(6, 5, together, longest_first);
}

void test_sections() {
  EXPECT(section_heads(1 << 20, 1 << 18, 1, 64) == 4, "four fit");
  EXPECT(section_heads(1 << 20, 1 << 18, 8, 64) == 32, "groups share");
  EXPECT(section_heads(1 << 20, 1 << 18, 8, 16) == 16, "all");
  EXPECT(section_heads(1 << 20, int64_t(1) << 40, 8, 16) == 8, "one group at least");
  EXPECT(section_heads(1 << 20, 0, 1, 16) == 16, "no keys");
}

// Every 64 rows of a sequence once, by tiles and by their pieces; tiles differ by one warpgroup at most.
void test_even_tiles() {
  for (const int warpgroups : {2, 3, 4})
    for (int seqlen_q = 1; seqlen_q < 2000; seqlen_q += 7) {
      const EvenTiles even = EvenTiles::of(seqlen_q, warpgroups);
      const int tiles = ceil_div(seqlen_q, 64 * warpgroups);
      if (even.tall < 0) {
        EXPECT(seqlen_q <= 64 * tiles * (warpgroups - 1) - 64, "too short to be even: ", seqlen_q);
        continue;
      }
      int next = 0;
      for (int m = 0; m < tiles; m++) {
        const auto all = even.rows(m, -1, warpgroups), first = even.rows(m, 0, warpgroups),
                   second = even.rows(m, 1, warpgroups);
        EXPECT(all.first == next && first.first == next, "tile ", m, " of ", seqlen_q);
        EXPECT(all.count == 64 * warpgroups || all.count == 64 * (warpgroups - 1), "tile ", m, " of ", seqlen_q);
        EXPECT(second.first == first.first + first.count && first.count + second.count == all.count, "pieces");
        next += all.count;
      }
      EXPECT(next >= seqlen_q && next < seqlen_q + 64, "rows of ", seqlen_q);
    }
}

void test_short_sections() {
  const auto of = [](int m_blocks, int section, int group) {
    return short_section({m_blocks, 1024, section, true}, group);
  };
  EXPECT(of(3, 128, 1) == 8, "three tiles a head");
  EXPECT(of(2, 128, 1) == 12, "two tiles a head");
  EXPECT(of(3, 128, 4) == 8, "whole groups");
  EXPECT(of(3, 128, 16) == 16, "one group at least");
  EXPECT(of(3, 4, 1) == 4, "no more than fit the cache");
  EXPECT(of(4, 128, 1) == 128, "enough tiles");
}

// What a warpgroup visits lies in its tile, leaves out no more than it may, holds every key its rows see, and blocks
// that are called full need no mask.
void test_blocks(const Band& band, int warpgroups, int block_n, SkipLimits skip) {
  const int block_m = 64 * warpgroups;
  for (int row0 = 0; row0 < band.seqlen_q; row0 += block_m) {
    const BlockRange tile = tile_blocks(band, row0, block_m, block_n);
    EXPECT(tile.count() >= 1 && tile.begin >= 0, "row ", row0);
    EXPECT(tile.end == 1 || tile.end * block_n < band.seqlen_k + block_n, "blocks that exist");
    for (int w = 0; w < warpgroups; w++) {
      const int first = row0 + 64 * w;
      const BlockRange r = warpgroup_blocks(band, tile, first, block_n, skip);
      EXPECT(r.count() >= 1, "at least one block");
      EXPECT(r.begin >= tile.begin && r.end <= tile.end, "inside the tile");
      if (first >= band.seqlen_q) continue;
      EXPECT(r.begin - tile.begin <= skip.left && tile.end - r.end <= skip.right, "passes over too many");
      for (int i = first; i < min_of(first + 64, band.seqlen_q); i++)
        for (int j = band.key_begin(i); j < band.key_end(i); j++)
          EXPECT(j / block_n >= r.begin && j / block_n < r.end, "key ", j, " of row ", i);
      for (int n = r.begin; n < r.end; n++)
        if (!r.needs_mask(n))
          for (int i = first; i < min_of(first + 64, band.seqlen_q); i++)
            EXPECT(band.key_begin(i) <= n * block_n && band.key_end(i) >= (n + 1) * block_n, "full block ", n);
    }
  }
}

void test_tile_numbers() {
  for (const Key& key : kInstances) {
    if (key.pass != Pass::kFwd || key.arch != Arch::kSm90) continue;
    const FwdTile t = fwd_tile(key.head_dim, key.head_dim_v, key.variant == Variant::kGeneral);
    const int at_launch = 65536 / (128 * (t.warpgroups + 1)) / 8 * 8;
    EXPECT(t.warpgroups * t.consumer_registers + t.producer_registers <= (t.warpgroups + 1) * at_launch, "registers");
    EXPECT(t.consumer_registers % 8 == 0 && t.producer_registers % 8 == 0 && t.consumer_registers <= 255, "registers");
    const int row = 128 * ceil_div(key.head_dim, 64), row_v = 128 * ceil_div(key.head_dim_v, 64);
    EXPECT(t.q_stages * 64 * t.warpgroups * row + t.kv_stages * t.block_n * (row + row_v) +
                   t.bias_stages * 64 * t.warpgroups * 128 <=
               225 * 1024,
           "shared memory");
    EXPECT(16 * t.early < t.block_n, "early groups");
    if (key.variant == Variant::kGeneral) EXPECT(t.block_n == 64 && t.bias_stages > 0, "bias is one panel");
  }
}

}  // namespace

int main() {
  for (const bool longest_first : {false, true})
    for (const TileOrder order : {TileOrder{1, 1, 1, false}, {7, 5, 2, false}, {3, 16, 16, false}, {64, 3, 1, false}})
      test_order({order.m_blocks, order.heads, order.section, longest_first});
  test_sections();
  test_short_sections();
  test_even_tiles();
  for (const int seqlen_q : {1, 64, 65, 128, 193, 1000})
    for (const int heads : {1, 5, 16, 64})
      for (const int warpgroups : {2, 3})
        for (const int blocks : {1, 12, 132}) test_tail(heads, seqlen_q, warpgroups, blocks);
  EXPECT(split_tail(1376, 16, 16384, 3, 132).split == 46, "10 rounds and 46 tiles");
  EXPECT(split_tail(1024, 8, 16384, 2, 132).split == 0, "7 rounds and 100 tiles");
  EXPECT(split_tail(16, 16, 128, 3, 132).split == 0 && split_tail(16, 16, 129, 3, 132).split == 11, "short sequences");
  test_batches_together();
  using Window = std::pair<int, int>;
  for (const int seqlen_q : {1, 63, 65, 200, 513})
    for (const int seqlen_k : {0, 1, 64, 129, 200, 700})
      for (const auto& [left, right] : {Window{-1, -1}, {-1, 0}, {64, 64}, {0, 0}, {100, -1}, {1000, 3}})
        for (const int warpgroups : {2, 3, 4})
          for (const int block_n : {64, 80, 128})
            test_blocks({seqlen_q, seqlen_k, left, right}, warpgroups, block_n, {1, 3});
  test_tile_numbers();
  return flash::test::finish("sm90 forward tiles");
}
