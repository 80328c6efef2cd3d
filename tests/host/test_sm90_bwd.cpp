// The index arithmetic of the Hopper backward.
#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "expect.h"
#include "instances.h"
#include "sm90/bwd_layout.h"
#include "sm90/bwd_tile.h"

using namespace flash;
using namespace flash::sm90;

namespace {

// No two segments of a packed batch share a band or a group of keys, and the workspace holds them all and what a step
// reads behind them.
void test_bands() {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; trial++) {
    const int batch = 1 + int(random() % 20);
    std::vector<int> lengths(batch);
    AttnParams p;
    for (int& length : lengths) p.total_q += length = random() % 3 == 0 ? int(random() % 3) : int(random() % 200);
    p.batch = batch;
    p.num_heads = 3;
    p.head_dim = 64;
    std::vector<int32_t> cu(batch + 1, 0);
    for (int b = 0; b < batch; b++) cu[b + 1] = cu[b] + lengths[b];
    p.seqlen_q = 1000;
    p.cu_seqlens_q = p.cu_seqlens_k = cu.data();
    p.total_k = p.total_q;
    const BwdWorkspace w = BwdWorkspace::of(p, 64);
    int64_t free = 0, free_group = 0;
    for (int b = 0; b < batch; b++) {
      const int64_t first = first_band(p, SeqInfo::of(p, b), b);
      EXPECT(first >= free, "segment ", b, " starts in a band of the one before");
      free = first + ceil_div(lengths[b], kBandRows);
      EXPECT(first + round_up(lengths[b], 64) / kBandRows <= w.bands, "the last step of segment ", b,
             " reads behind the workspace");
      const int64_t first_group = first_key_group(p, SeqInfo::of(p, b), b);
      EXPECT(first_group >= free_group, "segment ", b, " starts in a group of keys of the one before");
      free_group = first_group + ceil_div(lengths[b], kFewestBoundsKeys);
    }
    EXPECT(free_group <= w.key_groups, "groups of keys reach behind the workspace");
  }
}

// One fp32 copy of dQ and 8 MB.
void test_workspace() {
  for (int head_dim : {64, 72, 128, 192, 256})
    for (bool deterministic : {false, true}) {
      AttnParams p;
      p.batch = 16;
      p.seqlen_q = 1024;
      p.total_q = 16384;
      p.num_heads = p.num_heads_kv = 2048 / head_dim;
      p.head_dim = head_dim;
      p.deterministic = deterministic;
      const int64_t copy = p.total_q * p.num_heads * head_dim * 4;
      EXPECT(BwdWorkspace::of(p, 64).bytes <= copy + (8 << 20), "head_dim ", head_dim, " needs ",
             BwdWorkspace::of(p, 64).bytes);
    }
}

// Every block of rows and every block that bounds keys has one thread block.
void test_preprocess_grid() {
  for (int rows : {0, 1, 7, 64, 1000})
    for (int bounds : {0, 1, 3, 64, 999, 5000}) {
      const PreprocessGrid grid{rows, 1, bounds};
      std::vector<int> seen[2] = {std::vector<int>(rows), std::vector<int>(bounds)};
      EXPECT(grid.count(1) == rows + bounds, "count");
      for (unsigned block = 0; block < unsigned(rows + bounds); block++) {
        const PreprocessGrid::Role role = grid.role(block, rows + bounds);
        EXPECT(role.index < seen[role.bounds_keys].size(), "outside: ", block, " of ", rows, " and ", bounds);
        seen[role.bounds_keys][role.index]++;
      }
      for (const std::vector<int>& kind : seen)
        EXPECT(std::count(kind.begin(), kind.end(), 1) == int64_t(kind.size()), rows, " and ", bounds, ": not once");
    }
}

// Every block of keys of every head exactly once; within a section the first keys of all its heads come first.
void test_order() {
  for (int n_blocks : {1, 5, 16})
    for (int heads : {1, 6, 33})
      for (int section : {1, 4, 8}) {
        const BwdOrder order{n_blocks, heads, min_of(section, heads)};
        std::set<std::pair<int, int>> seen;
        int last_section = 0, last_n = 0;
        for (int64_t i = 0; i < order.count(); i++) {
          const BwdOrder::Item item = order.at(i);
          const int now = item.head / order.section;
          EXPECT(item.n_block >= 0 && item.n_block < n_blocks && item.head >= 0 && item.head < heads, "outside");
          EXPECT(seen.insert({item.n_block, item.head}).second, "twice: ", item.n_block, " ", item.head);
          EXPECT(now > last_section || (now == last_section && item.n_block >= last_n), "order at ", i);
          last_section = now;
          last_n = item.n_block;
        }
      }
}

// Rounded addends whose partial sums stay below the bound give the same sum in every order.
void test_exact_sum() {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 300; trial++) {
    const ExactSum sum = ExactSum::of(1.f + 20.f * float(random() % 3), 5.f, 1.f, 1);
    EXPECT(!sum.integers, "few keys");
    const float norm = std::exp(normal(random)), bound = norm * sum.largest_v * sum.largest_k,
                units = sum.scale(norm, 0.f);
    const int count = 1 + int(random() % 300);
    std::vector<float> addends(count);
    float left = bound;  // of the sum of absolute values
    for (float& x : addends) {
      x = (random() % 2 ? 1.f : -1.f) * left * (random() % 8 == 0 ? 0.9f : 0.01f) * float(random() % 1000) / 1000.f;
      left -= std::fabs(x);
    }
    float first = 0.f;
    double exact = 0.;
    for (int order = 0; order < 5; order++) {
      float total = 0.f;
      for (float x : addends) total += round_to_unit(x, units);
      if (order == 0) first = total;
      EXPECT(total == first, "order ", order, " gives ", total, " instead of ", first);
      std::shuffle(addends.begin(), addends.end(), random);
    }
    for (float x : addends) exact += x;
    EXPECT(std::fabs(first / units - exact) <= 0.5 * count / units + 1e-6 * bound, "far from the sum");
  }
  EXPECT(ExactSum::of(1.f, 1.f, 1.f, 1 << 18).integers, "too many keys for floats");
  EXPECT(ExactSum::of(NAN, 1.f, 1.f, 1).integers && std::isnan(ExactSum::of(NAN, 1.f, 1.f, 1).scale(1.f, 0.f)), "NaN");
  EXPECT(std::signbit(ExactSum::of(NAN, 1.f, 1.f, 1).scale(1.f, 0.f)), "rows of one head have one sign");
  EXPECT(std::isfinite(ExactSum::of(0.f, 0.f, 1.f, 1).scale(0.f, 0.f)), "nothing to add");
}

// Bounds are compared as bits: NaN, as arithmetic on the device makes it, is above infinity, and that above numbers.
void test_key_bounds() {
  const auto bits = [](float x) { return std::bit_cast<int>(x); };
  const int in_order[] = {0, bits(1e-30f), bits(1.f), bits(INFINITY), 0x7fffffff};
  for (int small : in_order)
    for (int large : in_order) {
      if (large < small) continue;
      const KeyBounds a{small, large, small}, b{large, small, large};
      for (const KeyBounds& c : {a.larger(b), b.larger(a)})
        EXPECT(c.largest_v == large && c.largest_k == large && c.smallness == large, small, " ", large);
    }
}

// Windows bound what a query sees.
void test_visible_keys() {
  AttnParams p;
  p.batch = 1;
  p.seqlen_q = p.seqlen_k = 1000;
  for (int left : {-1, 0, 10, 2000})
    for (int right : {-1, 0, 7, INT32_MAX}) {
      p.window_left = left, p.window_right = right;
      const SeqInfo seq = SeqInfo::of(p, 0);
      const Band band = Band::of(p, seq);
      int most = 0;
      for (int i = 0; i < p.seqlen_q; i++) most = max_of(most, band.key_end(i) - band.key_begin(i));
      EXPECT(visible_keys(p, seq) >= most && (left < 0 || right < 0 || visible_keys(p, seq) == most), left, " ", right);
    }
}

// ahead(step, n) is n times the next step.
void test_steps() {
  for (int count : {1, 2, 3, 7})
    for (int group : {1, 2, 5}) {
      const BwdSteps steps{4, count, group};
      std::vector<BwdSteps::Step> all;
      for (int head = 0; head < group; head++)
        for (int m = 4; m < 4 + count; m++) all.push_back({m, head});
      EXPECT(int(all.size()) == steps.total(), "total");
      for (int i = 0; i < steps.total(); i++)
        for (int n = 0; n < 5; n++) {
          const BwdSteps::Step got = steps.ahead(all[i], n);
          if (i + n < steps.total())
            EXPECT(got.m_block == all[i + n].m_block && got.head == all[i + n].head, "step ", i, " + ", n);
          else
            EXPECT(got.head >= group, "behind the end: ", i, " + ", n);
        }
    }
}

// Every entry of a tile finds its bit where the warp that makes them put it.
void test_kept_bits() {
  std::mt19937 random(4);
  bool kept[64][64];  // [key][query]
  for (auto& row : kept)
    for (bool& x : row) x = random() % 2;
  uint32_t words[128] = {};
  for (int lane = 0; lane < 32; lane++)
    for (int next_query = 0; next_query < 2; next_query++)
      for (int warp = 0; warp < 4; warp++)
        for (int of_pair = 0; of_pair < 2; of_pair++) {
          uint32_t byte = 0;
          for (int eight = 0; eight < 32; eight += 8)
            for (int of_warp = 0; of_warp < 16; of_warp += 8) {
              const int key = kept_key(lane) + of_pair + 16 * warp + of_warp;
              byte = byte << 1 | kept[key][kept_query(lane) + eight + next_query];
            }
          words[kept_thread(lane, warp, of_pair)] |= byte << 8 * kept_byte(lane, next_query);
        }
  for (int thread = 0; thread < 128; thread++)
    for (int i = 0; i < 32; i++) {
      const int key = thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2 % 2),
                query = 8 * (i / 4) + 2 * (thread % 4) + i % 2;
      const uint32_t sign = words[thread] << kept_shift(i) >> (8 * kept_byte(i) + 7) & 1;
      EXPECT((sign != 0) == kept[key][query], "thread ", thread, " entry ", i);
      EXPECT(i % 2 == 1 || (kept_shift(i) == kept_shift(i + 1) && kept_byte(i) != kept_byte(i + 1)), "pair ", i);
    }
}

// A place holds one part at a time, and waits find the phase of the fill they are for.
void test_part_ring() {
  using Ring = PartRing<2, 3>;
  int fills[Ring::kPlaces] = {};
  for (int step = 0; step < 9; step++)
    for (int part = 0; part < Ring::kParts; part++) {
      const int place = Ring::place(step, part);
      EXPECT(Ring::parity(step, part) == uint32_t(fills[place] % 2), "step ", step, " part ", part);
      fills[place]++;
      EXPECT(Ring::place(step, part) != Ring::place(step + part, 1 - part), "neighbours");
    }
  EXPECT(fills[0] == 6 && fills[1] == 6 && fills[2] == 6, "all places are used");
}

// What the kernels assume of the numbers.
void test_tiles() {
  for (const Key& key : kInstances) {
    if (key.pass != Pass::kBwd || key.arch != Arch::kSm90) continue;
    const BwdTile t = bwd_tile(key.head_dim, key.head_dim_v);
    EXPECT(t.block_m == 64 && t.block_n == 128, "tiles of head_dim ", key.head_dim);
    EXPECT(2 * t.registers_main + t.registers_dq + t.registers_producer <= 4 * 128, "registers of head_dim ",
           key.head_dim);
    EXPECT(t.registers_main % 8 == 0 && t.registers_dq % 8 == 0 && t.registers_producer % 8 == 0 &&
               t.registers_moved % 8 == 0,
           "registers come in eights");
    EXPECT(key.head_dim % t.dq_columns == 0, "pieces of dQ");
  }
}

}  // namespace

int main() {
  test_bands();
  test_workspace();
  test_preprocess_grid();
  test_order();
  test_part_ring();
  test_exact_sum();
  test_key_bounds();
  test_visible_keys();
  test_steps();
  test_kept_bits();
  test_tiles();
  return flash::test::finish("sm90 bwd");
}
