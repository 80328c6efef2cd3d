// simt/tile.h, simt/lanes.h and simt/bias_work.h: every tile fits its GPU, every number of a tile has one lane, shared
// memory is read without bank conflicts, and every part of a bias gradient is added once.
#include <set>
#include <utility>
#include <vector>

#include "expect.h"
#include "simt/bias_work.h"
#include "simt/lanes.h"
#include "simt/tile.h"

using namespace flash;
using namespace flash::simt;

namespace {

constexpr int kHeadDims[] = {64, 128, 256};

void test_tiles_fit() {
  for (int head_dim : kHeadDims)
    for (Pass pass : {Pass::kFwd, Pass::kBwd})
      for (bool compact : {true, false}) {
        const int bytes = pass == Pass::kFwd ? fwd_shared_bytes(Product::kFma, head_dim, compact)
                                             : bwd_shared_bytes(Product::kFma, head_dim, compact);
        const Tile t = tile_of(pass, Product::kFma, head_dim, compact);
        EXPECT(bytes <= (compact ? 64 : 227) * 1024, head_dim, " ", bytes);
        EXPECT(t.min_ctas * (bytes + 1024) <= (compact ? 64 : 228) * 1024 || t.min_ctas == 1 || compact, head_dim);
        EXPECT(t.warp_rows % FmaLanes::kLaneRows == 0 && t.block_n % FmaLanes::kLaneCols == 0, head_dim);
        EXPECT(65536 / (t.threads() * t.min_ctas) >= 128, head_dim);
      }
  for (int head_dim : {64, 128})
    for (Pass pass : {Pass::kFwd, Pass::kBwd})
      for (bool compact : {true, false}) {
        const Tile t = tile_of(pass, Product::kTf32x3, head_dim, compact);
        EXPECT(t.warp_rows % 16 == 0 && t.block_n % 16 == 0 && t.warps % (t.block_n / 16) == 0, head_dim);
        const int bytes = pass == Pass::kFwd ? fwd_shared_bytes(Product::kTf32x3, head_dim, compact)
                                             : bwd_shared_bytes(Product::kTf32x3, head_dim, compact);
        EXPECT(bytes <= (compact ? 99 : 163) * 1024, head_dim, " ", bytes);
      }
}

// Every (row, col) of kRows x kCols has exactly one (lane, r, c), both in score and in output tiles.
template <class Lanes>
void test_lanes_cover(int rows, int cols) {
  std::set<std::pair<int, int>> score, out;
  for (int lane = 0; lane < 32; lane++)
    for (int r = 0; r < rows / Lanes::kLaneRows; r++)
      for (int c = 0; c < cols / Lanes::kLaneCols; c++) {
        score.insert({Lanes::row(lane, r), Lanes::score_col(lane, c)});
        out.insert({Lanes::row(lane, r), Lanes::out_col(lane, c)});
        if (c % Lanes::kOutRun != 0)
          EXPECT(Lanes::out_col(lane, c) == Lanes::out_col(lane, c - 1) + 1, "runs of an output tile lie side by side");
      }
  EXPECT(int(score.size()) == rows * cols && score.rbegin()->first == rows - 1, rows, " x ", cols);
  EXPECT(int(out.size()) == rows * cols && out.rbegin()->first == rows - 1, rows, " x ", cols);
}

// The lanes that share a row are those that differ in the column bits only.
template <class Lanes>
void test_row_lanes() {
  int bits = 0;
  for (int bit = Lanes::kFirstColBit; bit <= Lanes::kLastColBit; bit *= 2) bits |= bit;
  for (int a = 0; a < 32; a++)
    for (int b = 0; b < 32; b++) EXPECT((Lanes::row(a, 0) == Lanes::row(b, 0)) == (((a ^ b) & ~bits) == 0), a, " ", b);
}

// Lanes that read at once: 8 for 16 bytes, 32 for 4 bytes. Different words must lie in different banks.
template <class Address>
bool free_of_conflicts(int lanes_at_once, int floats, const Address& address) {
  for (int first = 0; first < 32; first += lanes_at_once) {
    std::vector<std::set<int>> words(32);
    for (int lane = first; lane < first + lanes_at_once; lane++)
      for (int i = 0; i < floats; i++) words[(address(lane) + i) % 32].insert(address(lane) + i);
    for (const auto& bank : words)
      if (bank.size() > 1) return false;
  }
  return true;
}

void test_banks() {
  for (int head_dim : kHeadDims) {
    const int stride = tile_stride(head_dim);
    using F = FmaLanes;
    EXPECT(free_of_conflicts(8, 4, [&](int l) { return F::lane_row(l) * stride; }), "FMA, left operand");
    EXPECT(free_of_conflicts(16, 4, [&](int l) { return F::lane_col(l) * stride; }), "FMA, right operand of scores");
    EXPECT(free_of_conflicts(16, 4, [&](int l) { return F::out_col(l, 0); }), "FMA, right operand of accumulate");
    using M = MmaLanes;
    EXPECT(free_of_conflicts(8, 4, [&](int l) { return M::lane_row(l) * stride + 8 * M::lane_col(l); }), "mma, scores");
    EXPECT(free_of_conflicts(32, 1, [&](int l) { return 2 * M::lane_col(l) * stride + M::lane_row(l); }),
           "mma, accumulate");
  }
  for (int block_n : {8, 16, 32, 64}) {
    const int stride = scratch_stride(block_n);
    const auto word = [&](int l) { return FmaLanes::row(l, 0) * stride + FmaLanes::score_col(l, 0); };
    if (stride % 32 == 8) EXPECT(free_of_conflicts(32, 1, word), block_n);
  }
}

void test_bias_work() {
  for (int mask = 0; mask < 16; mask++) {  // which dimensions are broadcast
    const int sizes[4] = {2, 3, 4, 5};
    Bias dbias;
    dbias.batch = mask & 1 ? 0 : 1000;
    dbias.head = mask & 2 ? 0 : 100;
    dbias.row = mask & 4 ? 0 : 10;
    dbias.col = mask & 8 ? 0 : 1;
    int parts[4] = {2, 3, 4, 5};
    BiasWork::split(dbias, parts);
    std::set<std::vector<int>> seen;
    int count = 0;
    for (int cta = 0; cta < parts[0] * parts[1] * parts[2] * parts[3]; cta++) {
      const BiasWork w = BiasWork::of(dbias, cta, sizes);
      for (int b = w.begin[0]; b < w.end[0]; b++)
        for (int h = w.begin[1]; h < w.end[1]; h++)
          for (int m = w.begin[2]; m < w.end[2]; m++)
            for (int n = w.begin[3]; n < w.end[3]; n++, count++) seen.insert({b, h, m, n});
    }
    EXPECT(count == 120 && seen.size() == 120, "broadcast ", mask, ": ", count, " parts, ", seen.size(), " different");
  }
}

}  // namespace

int main() {
  test_tiles_fit();
  for (int rows : {16, 32})
    for (int cols : {32, 64, 128}) {
      test_lanes_cover<FmaLanes>(rows, cols);
      test_lanes_cover<MmaLanes>(rows, cols);
    }
  test_row_lanes<FmaLanes>();
  test_row_lanes<MmaLanes>();
  test_banks();
  test_bias_work();
  return flash::test::finish("simt_tiles");
}
