// Where the FP8 forward of sm_90 has V^T: the order of keys in a row, places in a tile; tiles of every row of the
// table.
#include <set>
#include <utility>
#include <vector>

#include "expect.h"
#include "instances.h"
#include "sm90/fp8_layout.h"
#include "sm90/fp8_tile.h"

using namespace flash;
using namespace flash::sm90;

namespace {

// Columns of a 64 x 32 product that lane l holds of its first row, in the order in which they are packed into the A
// operand's registers 0 and 2, and the k that those four bytes each stand for (ptx/wgmma.cuh, ptx/wgmma_fp8.cuh).
void test_order_of_keys() {
  for (int lane = 0; lane < 32; lane++)
    for (int half = 0; half < 2; half++)
      for (int byte = 0; byte < 4; byte++) {
        const int i = 8 * half + 4 * (byte / 2) + byte % 2;  // register of the accumulator
        const int key = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        const int place = 4 * (lane % 4) + byte + 16 * half;
        EXPECT(value_place(key) == place, "lane ", lane, " byte ", byte, ": ", value_place(key), " ", place);
      }
  for (int key = 0; key < 128; key++) {
    EXPECT(value_key(value_place(key)) == key, key);
    EXPECT(value_place(key) / 16 == key / 16, "inside its 16 keys: ", key);
  }
}

// Two registers of lane q: 16 bits of a key hold its columns 0 and 1.
void test_selectors() {
  for (int q = 0; q < 4; q++)
    for (int column = 0; column < 2; column++)
      for (int byte = 0; byte < 4; byte++) {
        const uint32_t from = value_selector(column) >> 4 * byte & 0xF;
        const int key = 8 * int(from / 4) + 2 * q + int(from / 2 % 2);
        EXPECT(value_place(key) == 4 * q + byte && int(from % 2) == column, "lane ", q, " byte ", byte);
      }
}

// Bytes of 32 keys of a tile as the 32-byte swizzle has them: bit 4 of the address xor bit 7.
void test_places_in_a_tile() {
  std::set<int> seen;
  for (int row = 0; row < 128; row++)
    for (int chunk = 0; chunk < 2; chunk++) {
      const int plain = row * 32 + chunk * 16;
      EXPECT(value_chunk_offset(row, chunk) == (plain ^ (plain >> 7 & 1) << 4), row, " ", chunk);
      EXPECT(seen.insert(value_chunk_offset(row, chunk)).second, "twice: ", row, " ", chunk);
    }
}

void test_dense_tiles() {
  AttnParams p;
  p.batch = 3;
  for (const int seqlen_k : {0, 1, 127, 128, 129, 1000}) {
    p.seqlen_k = seqlen_k;
    const ValueTiles tiles = ValueTiles::of(p, 128);
    for (int b = 0; b < p.batch; b++)
      EXPECT(tiles.first(b, 0) + max_of(1, ceil_div(seqlen_k, 128)) ==
                 (b + 1 < 3 ? tiles.first(b + 1, 0) : tiles.per_head),
             "sequences follow each other: ", seqlen_k, " ", b);
  }
}

// Every segment has room for all its tiles, at least one, before that of the next.
void test_packed_tiles() {
  std::mt19937 random(1);
  for (int round = 0; round < 200; round++) {
    std::vector<int32_t> cu{0};
    const int batch = 1 + int(random() % 20);
    for (int b = 0; b < batch; b++) cu.push_back(cu.back() + int(random() % 4 == 0 ? 0 : random() % 700));
    AttnParams p;
    p.batch = batch;
    p.cu_seqlens_k = cu.data();
    p.total_k = cu.back() + int(random() % 3) * 50;
    const int block_n = round % 2 ? 128 : 96;
    const ValueTiles tiles = ValueTiles::of(p, block_n);
    for (int b = 0; b < batch; b++) {
      const int64_t end = b + 1 < batch ? tiles.first(b + 1, cu[b + 1]) : tiles.per_head;
      const int needed = max_of(1, ceil_div(cu[b + 1] - cu[b], block_n));
      EXPECT(tiles.first(b, cu[b]) + needed <= end, "segment ", b, " of ", batch, ": ", cu[b], " ", cu[b + 1]);
    }
  }
}

// Every tile of every head once; a dense call's from the last of a sequence to its first, `together` heads at a time.
void test_order_of_jobs() {
  AttnParams p;
  p.batch = 3;
  p.num_heads_kv = 4;
  p.seqlen_k = 1000;
  const int32_t cu[] = {0, 300, 300, 900};
  for (const bool packed : {false, true})
    for (const int together : {0, 1, 5, 12, 100}) {
      p.cu_seqlens_k = packed ? cu : nullptr;
      p.total_k = 1000;
      const ValueTiles tiles = ValueTiles::of(p, 96);
      const ValueJobs jobs = ValueJobs::of(p, tiles, together, 2);
      EXPECT(int64_t(jobs.count) == tiles.per_head * 4 * 2, jobs.count);
      std::set<std::pair<int, int>> seen;
      for (int i = 0; i < int(jobs.count) / 2; i++) {
        int head, tile;
        jobs.decode(i, 4, head, tile);
        EXPECT(head >= 0 && head < 4 && tile >= 0 && tile < tiles.per_head, head, " ", tile);
        EXPECT(seen.insert({head, tile}).second, "twice: ", head, " ", tile);
        if (!packed && i < min_of(together, 12))
          EXPECT(tile % tiles.per_sequence == tiles.per_sequence - 1, i, ": ", tile);
      }
    }
}

// What must hold of tile numbers besides the static_asserts of Fp8Traits.
void test_tile_numbers() {
  for (const Key& key : kInstances) {
    if (key.dtype != kE4M3) continue;
    for (const bool two_levels : {false, true}) {
      const Fp8Tile t = fp8_tile(key.head_dim, two_levels);
      EXPECT(t.kv_stages >= 2 && t.q_stages >= 1, key.head_dim);
      EXPECT(t.block_n % 32 == 0 && t.early == 0, key.head_dim);
      EXPECT(t.raw_stages >= 2, key.head_dim);
    }
  }
}

}  // namespace

int main() {
  test_order_of_keys();
  test_selectors();
  test_places_in_a_tile();
  test_dense_tiles();
  test_packed_tiles();
  test_order_of_jobs();
  test_tile_numbers();
  return flash::test::finish("sm90_fp8");
}
