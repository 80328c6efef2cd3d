// The numbers and the index arithmetic of the sm_80 kernels.
#include <set>
#include <vector>

#include "expect.h"
#include "instances.h"
#include "sm80/bwd_sums.h"
#include "sm80/lane_columns.h"
#include "sm80/smem_tile.h"
#include "sm80/tile.h"
#include "sm80/work.h"

using namespace flash;
using namespace flash::sm80;

namespace {

// Every chunk has a place of its own, and lies where a lane finds it that knows only its own first address.
template <int kRows, int kCols>
void test_smem_tile() {
  using Tile = SmemTile<kRows, kCols>;
  std::set<int> places;
  for (int row = 0; row < kRows; row++)
    for (int col = 0; col < kCols; col += 8) {
      const int offset = Tile::offset(row, col), row0 = row / 8 * 8, col0 = col / 16 * 16;
      EXPECT(offset % 16 == 0 && offset >= 0 && offset + 16 <= Tile::kBytes && places.insert(offset).second, row, " ",
             col);
      EXPECT((Tile::offset(row - row0, col - col0) ^ Tile::flip(col0)) + Tile::shift(row0, col0) == offset, row, " ",
             col);
    }
  // ldmatrix reads eight rows of a chunk column: each in a 16-byte bank of its own.
  for (int row0 = 0; row0 < kRows; row0 += 8)
    for (int col = 0; col < kCols; col += 8) {
      std::set<int> banks;
      for (int row = row0; row < row0 + 8; row++) banks.insert(Tile::offset(row, col) % 128);
      EXPECT(banks.size() == 8, "bank conflict at ", row0, " ", col);
    }
}

// The threads of a copy share the tile, and each eight lanes write to different banks.
template <int kRows, int kCols, int kThreads>
void test_copy_lanes() {
  using Tile = SmemTile<kRows, kCols>;
  using Lanes = CopyLanes<Tile, kThreads>;
  std::set<int> copied;
  for (int r = 0; r < kRows; r += Lanes::kRowsPerPass)
    for (int c = 0; c < kCols; c += Lanes::kCols)
      for (int thread = 0; thread < kThreads; thread++) {
        const int row = r + Lanes::row(thread), col = c + Lanes::col(thread);
        EXPECT(row < kRows && col < kCols && copied.insert(row * kCols + col).second, "thread ", thread, ": ", row, " ",
               col);
      }
  EXPECT(int(copied.size()) == kRows * kCols / 8, "whole tile");
  for (int thread = 0; thread < kThreads; thread += Lanes::kLanesPerRow) {
    std::set<int> banks;
    for (int lane = thread; lane < thread + Lanes::kLanesPerRow; lane++)
      banks.insert(Tile::offset(Lanes::row(lane), Lanes::col(lane)) % 128);
    EXPECT(int(banks.size()) == Lanes::kLanesPerRow, "bank conflict at thread ", thread);
  }
}

// Each element of dq is summed in exactly one place, and each place is used.
template <int kHeadDim, bool kSmall>
void test_dq_pieces() {
  constexpr BwdTile kTile = bwd_tile(kHeadDim, kHeadDim, kSmall);
  constexpr int kBlockM = kTile.kBlockM, kWarps = kTile.warps();
  using Pieces = DqPieces<kBlockM, kHeadDim, kWarps, kTile.kDqCols>;
  std::set<int> elements, fragments;
  for (int warp = 0; warp < kWarps; warp++)
    for (int piece = 0; piece < Pieces::kPieces; piece++)
      for (int m = 0; m < 2; m++)
        for (int n = 0; n < Pieces::kCols / 8; n++) {
          const int offset = Pieces::fragment(warp, piece, m, n);
          EXPECT(offset % 128 == 0 && offset < Pieces::kFloats && fragments.insert(offset).second, "fragment ", offset);
          elements.insert((Pieces::row0(warp) + 16 * m) * kHeadDim + Pieces::col0(warp, piece) + 8 * n);
        }
  EXPECT(int(fragments.size()) * 128 == Pieces::kFloats && elements.size() == fragments.size(), "dq ", kBlockM, "x",
         kHeadDim);
}

void test_tile_index() {
  const int32_t cu[] = {0, 1, 64, 64, 192, 193, 321};
  AttnParams p;
  p.batch = 6;
  p.cu_seqlens_q = cu;
  p.total_q = 321;
  p.seqlen_k = 130;
  const auto queries = TileIndex<64>::of_queries(p), keys = TileIndex<64>::of_keys(p);
  std::set<int64_t> of_queries, of_keys;
  for (int b = 0; b < p.batch; b++) {
    for (int tile = 0; tile < ceil_div(cu[b + 1] - cu[b], 64); tile++) {
      const int64_t index = queries.index(b, cu[b], tile);
      EXPECT(index >= 0 && index < queries.count() && of_queries.insert(index).second, "sequence ", b, " tile ", tile,
             ": ", index);
    }
    for (int tile = 0; tile < 3; tile++) of_keys.insert(keys.index(b, 0, tile));
  }
  EXPECT(int64_t(of_keys.size()) == keys.count() && *of_keys.rbegin() == keys.count() - 1, "dense keys");
}

void test_head_splits() {
  AttnParams p;
  p.batch = 1, p.seqlen_k = 4096;
  p.num_heads = 32, p.num_heads_kv = 32;
  EXPECT(head_splits(p, 128) == 1, "nothing to share");
  p.num_heads_kv = 1;
  EXPECT(head_splits(p, 128) == 16, "32 tiles become 512 blocks");
  p.num_heads = 6;
  EXPECT(head_splits(p, 128) == 6, "as many as there are heads");
  p.batch = 8;
  EXPECT(head_splits(p, 128) == 2, "the smallest divisor that is enough");
  p.batch = 0;
  EXPECT(head_splits(p, 128) >= 1, "an empty call");
}

// Every tile of queries is visited by one block of keys after the other, without a gap in the turns: a gap would be a
// deadlock.
void test_dq_turns() {
  for (const int block_m : {2, 3})
    for (const int block_n : {2, 4})
      for (int seqlen_q = 1; seqlen_q < 10; seqlen_q++)
        for (int seqlen_k = 1; seqlen_k < 10; seqlen_k++)
          for (int left = -1; left < 9; left++)
            for (int right = -1; right < 9; right++) {
              const Band band{seqlen_q, seqlen_k, left, right};
              std::vector<int> turns(ceil_div(seqlen_q, block_m));
              for (int key_block = 0; key_block < ceil_div(seqlen_k, block_n); key_block++) {
                const BlockRange queries = query_blocks(band, key_block * block_n, block_n, block_m);
                for (int m = queries.begin; m < queries.end; m++) {
                  const int turn = dq_turn(band, m * block_m, block_m, key_block, block_n);
                  EXPECT(turn == turns[m]++, "seqlens ", seqlen_q, " ", seqlen_k, " window ", left, " ", right,
                         " tile ", m);
                }
              }
            }
}

void test_divisor() {
  for (const unsigned d : {1u, 2u, 3u, 7u, 64u, 100u, 513u, 65535u, 1u << 20, 1000000007u, 0x7FFFFFFFu}) {
    const Divisor divisor = Divisor::of(d);
    for (const unsigned q : {0u, 1u, 2u, 1000u, 0x7FFFFFFFu / d - 1, 0x7FFFFFFFu / d})
      for (int64_t x = int64_t(q) * d - 2; x <= int64_t(q) * d + 2; x++)
        if (x >= 0 && x <= 0x7FFFFFFF) EXPECT(divisor.quotient(unsigned(x)) == unsigned(x) / d, x, " / ", d);
  }
}

void test_head_by_head() {
  std::set<int> seen;
  const TileOrder order = TileOrder::head_by_head(3, 4);
  for (unsigned block = 0; block < 3 * 4 * 5; block++) {
    const Work w = order.work_of(block);
    EXPECT(w.tile < 3 && w.head < 4 && w.batch_index < 5, "block ", block);
    seen.insert((w.batch_index * 4 + w.head) * 3 + w.tile);
  }
  EXPECT(seen.size() == 60, "every tile once");
  EXPECT(order.work_of(7).tile == 1 && order.work_of(7).head == 2, "tiles of a head follow each other");
}

// Every tile once; those of one head in order, and tile t + 1 of none before tile t of all heads that go together.
void test_tile_by_tile() {
  for (const int tiles : {1, 3, 100, 700})
    for (const int heads : {1, 4, 7, 64})
      for (const int batch : {1, 5}) {
        std::set<int> seen;
        std::vector<int> next(heads * batch);
        const TileOrder order = TileOrder::tile_by_tile(tiles, heads, batch, 512);
        int longest_run = 0, run = 0, before = -1;
        for (unsigned block = 0; block < unsigned(tiles * heads * batch); block++) {
          const Work w = order.work_of(block);
          EXPECT(w.tile >= 0 && w.head >= 0 && w.head < heads && w.batch_index >= 0 && w.batch_index < batch, "block ",
                 block);
          const int unit = w.batch_index * heads + w.head;
          EXPECT(w.tile == next[unit]++ && w.tile < tiles, "block ", block);
          seen.insert(unit * tiles + w.tile);
          run = w.tile == before ? run + 1 : 1;
          before = w.tile;
          longest_run = max_of(longest_run, run);
        }
        EXPECT(int(seen.size()) == tiles * heads * batch, "every tile once");
        EXPECT(tiles == 1 || (longest_run >= batch && longest_run <= max_of(512 / tiles, batch)),
               "heads together: ", longest_run);
      }
}

void test_lane_columns() {
  for (const int col_tiles : {4, 8})
    for (int begin = -9; begin < 8 * col_tiles + 9; begin++)
      for (int end = -9; end < 8 * col_tiles + 9; end++) {
        const uint32_t columns = lane_columns(begin, end, col_tiles);
        for (int n = 0; n < col_tiles; n++)
          for (int i = 0; i < 2; i++) {
            const int col = 8 * n + i;
            EXPECT((columns >> (2 * n + i) & 1) == (col >= begin && col < end), "column ", col, " of ", begin, " ",
                   end);
          }
        EXPECT(columns >> (2 * col_tiles) == 0, "no others");
      }
}

// Every row of the table runs on every device, with as many blocks as its registers were divided for where memory
// allows.
void test_tiles_fit() {
  const SharedMemory devices[] = {kSharedMemorySm80, kSharedMemorySm86, kSharedMemorySm90};
  // Of 65536 registers; ptxas gives a thread at most 255, in steps of eight.
  const auto registers_fit = [](const auto& tile) { return tile.threads() * tile.kBlocksPerSm <= 65536 / 256; };
  for (const Key& key : kInstances) {
    if (key.arch != Arch::kSm80 || key.dtype == DType::kF32) continue;
    for (const SharedMemory& device : devices) {
      const int d = key.head_dim, dv = key.head_dim_v;
      if (key.pass == Pass::kFwd) {
        const FwdTile large = fwd_tile(d, dv), small = fwd_tile(d, dv, true);
        EXPECT(fits(device, 1, fwd_smem(large, d, dv).bytes) || fits(device, 1, fwd_smem(small, d, dv).bytes),
               "forward ", d, "/", dv, " in ", device.per_block);
        EXPECT(large.kBlockM % (16 * large.kRowTiles) == 0 && large.kBlockN % 32 == 0, "forward ", d, "/", dv);
        EXPECT(large.kColWarps == 1 || dv / large.kColWarps % 64 == 0, "forward ", d, "/", dv, ": panels of a warp");
        EXPECT(registers_fit(large) && registers_fit(small), "forward ", d, "/", dv);
      } else if (key.pass == Pass::kBwd) {
        const BwdTile large = bwd_tile(d, dv), small = bwd_tile(d, dv, true);
        EXPECT(fits(device, 1, bwd_smem(large, d, dv).bytes(1)) || fits(device, 1, bwd_smem(small, d, dv).bytes(1)),
               "backward ", d, "/", dv, " in ", device.per_block);
        EXPECT(registers_fit(large) && registers_fit(small), "backward ", d, "/", dv);
      }
    }
  }
  // What lies behind the tiles costs no block: two of head_dim 64 on every device, also in the backward's single stage.
  const int forward = fwd_smem(fwd_tile(64, 64), 64, 64).bytes;
  for (const SharedMemory& device : devices) EXPECT(fits(device, 2, forward), "forward 64 twice");
  EXPECT(fits(kSharedMemorySm80, 2, bwd_smem(bwd_tile(64, 64), 64, 64).bytes(1)), "backward 64 twice");
  EXPECT(fits(kSharedMemorySm90, 2, fwd_smem(fwd_tile(128, 128), 128, 128).bytes), "forward 128 twice");
  const SharedMemory smaller = with_smaller_blocks(kSharedMemorySm90, 99 * 1024);
  EXPECT(smaller.per_block == kSharedMemorySm86.per_block && smaller.per_sm == kSharedMemorySm86.per_sm, "as sm_86");
  EXPECT(with_smaller_blocks(kSharedMemorySm86, 163 * 1024).per_sm == kSharedMemorySm86.per_sm, "no larger ones");
  EXPECT(choose_stages(kSharedMemorySm86, 2, 60 * 1024, 40 * 1024) == 1, "two blocks of one stage");
  EXPECT(choose_stages(kSharedMemorySm90, 2, 60 * 1024, 40 * 1024) == 2, "two blocks of two stages");
}

}  // namespace

int main() {
  test_smem_tile<64, 64>();
  test_smem_tile<32, 96>();
  test_smem_tile<128, 32>();
  test_smem_tile<64, 192>();
  test_copy_lanes<64, 128, 128>();
  test_copy_lanes<32, 96, 128>();
  test_copy_lanes<128, 64, 256>();
  test_copy_lanes<32, 64, 32>();
  test_dq_pieces<64, false>();
  test_dq_pieces<96, false>();
  test_dq_pieces<128, false>();
  test_dq_pieces<128, true>();
  test_dq_pieces<192, false>();
  test_dq_pieces<192, true>();
  test_dq_pieces<256, false>();
  test_dq_pieces<256, true>();
  test_tile_index();
  test_head_splits();
  test_dq_turns();
  test_divisor();
  test_head_by_head();
  test_tile_by_tile();
  test_lane_columns();
  test_tiles_fit();
  return flash::test::finish("sm80 tiles");
}
