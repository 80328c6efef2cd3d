// The numbers and the index arithmetic of the sm_80 kernels.
#include <set>
#include <vector>

#include "expect.h"
#include "instances.h"
#include "sm80/dq_accum.h"
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
template <int kBlockM, int kHeadDim, int kWarps>
void test_dq_pieces() {
  using Pieces = DqPieces<kBlockM, kHeadDim, kWarps>;
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

void test_dq_tiles() {
  using Tiles = DqTiles<64>;
  const int32_t cu[] = {0, 1, 64, 64, 192, 193, 321};
  AttnParams p;
  p.batch = 6;
  p.cu_seqlens_q = cu;
  p.total_q = 321;
  std::set<int64_t> used;
  for (int b = 0; b < p.batch; b++)
    for (int tile = 0; tile < ceil_div(cu[b + 1] - cu[b], 64); tile++) {
      const int64_t index = Tiles::index(p, b, cu[b], tile);
      EXPECT(index >= 0 && index < Tiles::count(p) && used.insert(index).second, "sequence ", b, " tile ", tile, ": ",
             index);
    }
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
              for (int key_block = ceil_div(seqlen_k, block_n) - 1; key_block >= 0; key_block--) {
                const BlockRange queries = query_blocks(band, key_block * block_n, block_n, block_m);
                for (int m = queries.begin; m < queries.end; m++) {
                  const int turn = dq_turn(band, m * block_m, block_m, key_block, block_n);
                  EXPECT(turn == turns[m]++, "seqlens ", seqlen_q, " ", seqlen_k, " window ", left, " ", right,
                         " tile ", m);
                }
              }
            }
}

void test_work() {
  std::set<int> seen;
  for (unsigned block = 0; block < 3 * 4 * 5; block++) {
    const Work w = Work::of(block, 3, 4), reversed = Work::last_tile_first(block, 3, 4);
    EXPECT(reversed.tile == 2 - w.tile && reversed.head == w.head && reversed.batch_index == w.batch_index, "block ",
           block);
    EXPECT(w.tile < 3 && w.head < 4 && w.batch_index < 5, "block ", block);
    seen.insert((w.batch_index * 4 + w.head) * 3 + w.tile);
  }
  EXPECT(seen.size() == 60, "every tile once");
}

// Every row of the table runs on every device, with as many blocks as its registers were divided for where memory
// allows.
void test_tiles_fit() {
  const SharedMemory devices[] = {kSharedMemorySm80, kSharedMemorySm86, kSharedMemorySm90};
  for (const Key& key : kInstances) {
    if (key.arch != Arch::kSm80 || key.dtype == DType::kF32) continue;
    for (const SharedMemory& device : devices) {
      const int d = key.head_dim, dv = key.head_dim_v;
      if (key.pass == Pass::kFwd) {
        const FwdTile large = fwd_tile(d, dv), small = fwd_tile(d, dv, true);
        EXPECT(fits(device, 1, fwd_smem_bytes(large, d, dv)) || fits(device, 1, fwd_smem_bytes(small, d, dv)),
               "forward ", d, "/", dv, " in ", device.per_block);
        EXPECT(large.kBlockM % (16 * large.kRowTiles) == 0 && large.kBlockN % 32 == 0, "forward ", d, "/", dv);
      } else if (key.pass == Pass::kBwd) {
        const BwdTile large = bwd_tile(d, dv), small = bwd_tile(d, dv, true);
        EXPECT(fits(device, 1, bwd_smem(large, d, dv).bytes(1)) || fits(device, 1, bwd_smem(small, d, dv).bytes(1)),
               "backward ", d, "/", dv, " in ", device.per_block);
      }
    }
  }
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
  test_dq_pieces<64, 64, 4>();
  test_dq_pieces<64, 96, 4>();
  test_dq_pieces<64, 128, 4>();
  test_dq_pieces<64, 128, 8>();
  test_dq_pieces<32, 192, 4>();
  test_dq_pieces<64, 192, 8>();
  test_dq_pieces<64, 256, 8>();
  test_dq_pieces<32, 256, 4>();
  test_dq_tiles();
  test_dq_turns();
  test_work();
  test_tiles_fit();
  return flash::test::finish("sm80 tiles");
}
