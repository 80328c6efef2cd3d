// attn/mask.h against its definition, over all small shapes, windows and tile sizes.
#include "attn/mask.h"

#include <climits>

#include "expect.h"

using namespace flash;

namespace {

bool visible(const Band& b, int i, int j) {  // the definition, in 64 bit
  const int64_t diagonal = int64_t(i) + b.seqlen_k - b.seqlen_q;
  return i >= 0 && i < b.seqlen_q && j >= 0 && j < b.seqlen_k && (b.window_left < 0 || j >= diagonal - b.window_left) &&
         (b.window_right < 0 || j <= diagonal + b.window_right);
}

std::string text(const Band& b) {
  return message("seqlens ", b.seqlen_q, " ", b.seqlen_k, " window ", b.window_left, " ", b.window_right);
}

void test_rows_and_columns(const Band& b) {
  for (int i = 0; i < b.seqlen_q; i++)
    for (int j = 0; j < b.seqlen_k; j++) {
      EXPECT(b.visible(i, j) == visible(b, i, j), text(b), " at ", i, " ", j);
      EXPECT((i >= b.query_begin(j) && i < b.query_end(j)) == visible(b, i, j), text(b), " at ", i, " ", j);
    }
  EXPECT(b.query_end(b.seqlen_k) <= b.query_begin(b.seqlen_k), text(b), ": a key that does not exist");
}

// What a tile pair holds: how many pairs of existing query and key, and how many of them are visible. Positions past
// the end count as existing if asked for: the kernels' tiles have them.
struct Count {
  int visible = 0, hidden = 0;
};

Count count(const Band& b, int row0, int row_end, int col0, int col_end) {
  Count c;
  for (int i = row0; i < row_end; i++)
    for (int j = col0; j < col_end; j++) (visible(b, i, j) ? c.visible : c.hidden)++;
  return c;
}

void test_blocks(const Band& b, int block_m, int block_n) {
  const int m_blocks = ceil_div(b.seqlen_q, block_m), n_blocks = ceil_div(b.seqlen_k, block_n);
  for (int m = 0; m < m_blocks; m++) {
    const BlockRange keys = key_blocks(b, m * block_m, block_m, block_n);
    EXPECT(0 <= keys.begin && keys.begin <= keys.full_begin && keys.full_begin <= keys.full_end &&
               keys.full_end <= keys.end && keys.end <= n_blocks,
           text(b), " key_blocks of tile ", m, ": ", keys.begin, " ", keys.full_begin, " ", keys.full_end, " ",
           keys.end);
    for (int n = 0; n < n_blocks; n++) {
      const BlockRange queries = query_blocks(b, n * block_n, block_n, block_m);
      EXPECT(0 <= queries.begin && queries.begin <= queries.full_begin && queries.full_begin <= queries.full_end &&
                 queries.full_end <= queries.end && queries.end <= m_blocks,
             text(b), " query_blocks of tile ", n);
      const std::string where = message(text(b), " tile ", block_m, "x", block_n, " at ", m, " ", n);
      const bool of_m = n >= keys.begin && n < keys.end, of_n = m >= queries.begin && m < queries.end;

      // Rows past seqlen_q do not count: a kernel does not store them. Columns past seqlen_k do: they would enter the
      // sums.
      const int row_end = min_of(m * block_m + block_m, b.seqlen_q);
      const Count c = count(b, m * block_m, row_end, n * block_n, n * block_n + block_n);
      EXPECT(of_m == (c.visible > 0), where, ": a tile is visited where something is visible");
      EXPECT(of_n == of_m, where, ": the same pairs of tiles from either side");
      if (of_m) EXPECT(keys.needs_mask(n) == (c.hidden > 0), where, ": masked where something is hidden");
      // For dk and dv, rows past seqlen_q count as well.
      const Count all = count(b, m * block_m, m * block_m + block_m, n * block_n, n * block_n + block_n);
      if (of_n) EXPECT(queries.needs_mask(m) == (all.hidden > 0), where, ": masked where something is hidden");
    }
  }
}

void test_all_small() {
  for (int seqlen_q = 0; seqlen_q <= 7; seqlen_q++)
    for (int seqlen_k = 0; seqlen_k <= 7; seqlen_k++)
      for (int left = -1; left <= 8; left++)
        for (int right = -1; right <= 8; right++) {
          const Band b{seqlen_q, seqlen_k, left, right};
          test_rows_and_columns(b);
          for (int block_m = 1; block_m <= 4; block_m++)
            for (int block_n = 1; block_n <= 4; block_n++) test_blocks(b, block_m, block_n);
        }
}

// The kernels' own tiles, on lengths around their multiples.
void test_kernel_tiles() {
  const int tiles[][2] = {{64, 64}, {128, 128}, {128, 176}, {64, 32}, {192, 128}};
  const int lengths[] = {1, 63, 64, 65, 127, 129, 200, 384};
  const int windows[] = {-1, 0, 1, 63, 64, 100, 200};
  for (const auto& tile : tiles)
    for (int seqlen_q : lengths)
      for (int seqlen_k : lengths)
        for (int left : windows)
          for (int right : {-1, 0, 65}) test_blocks({seqlen_q, seqlen_k, left, right}, tile[0], tile[1]);
}

void test_huge_window() {
  AttnParams p;
  p.window_left = p.window_right = INT_MAX;
  const Band b = Band::of(p, {0, 0, 1024, 256});
  for (int i : {0, 1, 767, 768, 1023})
    EXPECT(b.key_begin(i) == 0 && b.key_end(i) == 256, "row ", i, ": ", b.key_begin(i), " ", b.key_end(i));
  for (int j : {0, 255}) EXPECT(b.query_begin(j) == 0 && b.query_end(j) == 1024, "key ", j);
  EXPECT(key_blocks(b, 0, 64, 64).end == 4 && query_blocks(b, 0, 64, 64).end == 16, "no overflow");
}

}  // namespace

int main() {
  test_all_small();
  test_kernel_tiles();
  test_huge_window();
  return flash::test::finish("mask");
}
