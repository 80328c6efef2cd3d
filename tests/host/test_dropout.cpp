// attn/dropout.h: the generator against the published vectors of Random123, the layout of its bits, and their
// statistics.
#include "attn/dropout.h"

#include <array>
#include <bit>
#include <set>
#include <vector>

#include "expect.h"

using namespace flash;

namespace {

bool equal(const Philox& got, std::array<uint32_t, 4> want) {
  for (int i = 0; i < 4; i++)
    if (got.word[i] != want[i]) return false;
  return true;
}

void test_published_vectors() {
  const uint64_t ones = ~uint64_t(0), pi = 0x299f31d0a4093822;
  const uint32_t all = 0xffffffff;
  EXPECT(equal(Philox::at<10>(0, 0, 0, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}), "zeros");
  EXPECT(equal(Philox::at<10>(ones, all, all, all, all), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}), "ones");
  EXPECT(equal(Philox::at<10>(pi, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344),
               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}),
         "pi");
  EXPECT(equal(Philox::at(0, 0, 0, 0, 0), {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}), "7 rounds, zeros");
  EXPECT(equal(Philox::at(ones, all, all, all, all), {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}),
         "7 rounds, ones");
  EXPECT(equal(Philox::at(pi, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344),
               {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}),
         "7 rounds, pi");
}

void test_rows() {
  std::mt19937_64 random(3);
  for (int i = 0; i < 1000; i++) {
    const int64_t state[] = {int64_t(random()), int64_t(random())};
    const Dropout dropout = Dropout::of(0.1f, state);
    const uint32_t head = uint32_t(random()), row = uint32_t(random()), col = uint32_t(random());
    const Philox want = dropout.draw(head, row, col);
    EXPECT(equal(dropout.of_row(head, row).at(Dropout::counter(col)),
                 {want.word[0], want.word[1], want.word[2], want.word[3]}),
           "head ", head, " row ", row, " column ", col);
  }
}

// The entries of one call: the accumulator columns of one thread, in rows r and r + 8.
struct Entry {
  uint32_t row, col;
};
std::vector<Entry> entries_of_call() {
  std::vector<Entry> entries;
  for (uint32_t row : {0, 8})
    for (uint32_t i = 0; i < 8; i++)
      for (uint32_t bit = 0; bit < 2; bit++) entries.push_back({row, 8 * i + bit});
  return entries;
}

void test_entries_of_call() {
  const int64_t state[] = {1234567890123, 42};
  const Dropout dropout = Dropout::of(0.5f, state);
  std::set<std::pair<uint32_t, uint32_t>> calls;
  for (uint32_t row = 0; row < 64; row++)
    for (uint32_t col = 0; col < 256; col += 2) {
      const Philox random = dropout.draw(3, row, col);
      calls.emplace(random.word[0], random.word[1]);
      const uint32_t first_row = row & ~8u, first_col = col / 64 * 64 + col % 8;
      for (const Entry& e : entries_of_call())
        EXPECT(dropout.keep(random, e.row, e.col) == dropout.keep(3, first_row + e.row, first_col + e.col), "row ", row,
               " column ", col, " serves ", first_row + e.row, ", ", first_col + e.col);
    }
  EXPECT(calls.size() == 64 * 256 / 32, calls.size(), " calls");
}

// Words are linear in the four of a call: any two of the sixteen are as independent as those if a minor of their
// factors is odd; but for their lowest bit, if it leaves 2 of 4.
void test_pairs_of_words() {
  std::vector<std::array<uint32_t, 4>> factors;
  for (uint32_t row : {0, 8})
    for (uint32_t col = 0; col < 64; col += 8) {
      factors.emplace_back();
      for (int i = 0; i < 4; i++) {
        Philox unit{};
        unit.word[i] = 1;
        factors.back()[i] = Dropout::word(unit, row, col);
      }
    }
  for (size_t x = 0; x < factors.size(); x++)
    for (size_t y = 0; y < x; y++) {
      bool independent = false;
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++)
          independent |= (factors[x][i] * factors[y][j] - factors[x][j] * factors[y][i]) % 4 != 0;
      EXPECT(independent, "words ", x, " and ", y);
    }
}

// How often two, three and four entries of a call are dropped together, against independent ones.
void test_entries_together() {
  constexpr int kCalls = 1 << 17;
  const int64_t state[] = {99, 3};
  const std::vector<Entry> entries = entries_of_call();
  for (float p : {0.1f, 0.5f}) {
    const Dropout dropout = Dropout::of(p, state);
    using Bits = std::vector<uint64_t>;
    std::vector<Bits> dropped(entries.size(), Bits(kCalls / 64));
    for (int call = 0; call < kCalls; call++) {
      const Philox random = dropout.draw(0, call / 8 * 16 + call % 8, 0);
      for (size_t e = 0; e < entries.size(); e++)
        dropped[e][call / 64] |= uint64_t(!dropout.keep(random, entries[e].row, entries[e].col)) << call % 64;
    }
    double worst[5] = {};  // by number of entries
    const auto both = [](const Bits& a, const Bits& b) {
      Bits c(a.size());
      for (size_t i = 0; i < a.size(); i++) c[i] = a[i] & b[i];
      return c;
    };
    const auto judge = [&](const Bits& together, int count) {
      int64_t got = 0;
      for (uint64_t x : together) got += std::popcount(x);
      const double q = std::pow(dropout.threshold / 32768., count), sigma = std::sqrt(kCalls * q * (1 - q));
      worst[count] = std::max(worst[count], std::abs(got - kCalls * q) / sigma);
    };
    for (size_t a = 0; a < entries.size(); a++)
      for (size_t b = 0; b < a; b++) {
        const Bits two = both(dropped[a], dropped[b]);
        judge(two, 2);
        for (size_t c = 0; c < b; c++) {
          const Bits three = both(two, dropped[c]);
          judge(three, 3);
          for (size_t d = 0; d < c; d++) judge(both(three, dropped[d]), 4);
        }
      }
    for (int count = 2; count <= 4; count++)
      EXPECT(worst[count] < 5.5, "p ", p, ": ", count, " entries, ", worst[count], " standard deviations");
  }
}

void test_two_at_once() {
  const int64_t state[] = {5, 6};
  for (float p : {0.f, 0.1f, 0.5f, 0.999f, 1.f}) {
    const Dropout dropout = Dropout::of(p, state);
    for (uint32_t col = 0; col < 4096; col += 2) {
      const Philox random = dropout.draw(1, 9, col);
      const uint32_t signs = dropout.kept_signs(Dropout::word(random, 9, col));
      for (uint32_t bit = 0; bit < 2; bit++)
        EXPECT((signs >> (15 + 16 * bit) & 1) == dropout.keep(random, 9, col + bit), "p ", p, " column ", col + bit);
    }
  }
}

// The share that is dropped, over all values of 16 bits.
void test_all_halves() {
  const int64_t state[] = {1, 2};
  for (float p : {0.01f, 0.1f, 0.2f, 0.3f, 0.5f, 0.77f, 0.9f}) {
    const Dropout dropout = Dropout::of(p, state);
    double dropped = 0;
    for (uint32_t half = 0; half < 65536; half++) dropped += !dropout.keep(Philox{{half, 0, 0, 0}}, 0, 0);
    EXPECT(std::abs(dropped / 65536 - p) <= 1. / 65536, "p ", p, ": ", dropped / 65536);
  }
}

std::vector<float> kept(float p, int64_t seed, int64_t offset, uint32_t head, int rows, int cols) {
  const int64_t state[] = {seed, offset};
  const Dropout dropout = Dropout::of(p, state);
  std::vector<float> matrix;
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < cols; j++) matrix.push_back(dropout.keep(head, i, j) ? dropout.scale : 0.f);
  return matrix;
}

double mean(const std::vector<float>& x) {
  double sum = 0;
  for (float value : x) sum += value;
  return sum / double(x.size());
}

// Correlation of two sets of kept entries, in standard deviations of independent ones.
double correlation(const std::vector<float>& a, const std::vector<float>& b) {
  const double ma = mean(a), mb = mean(b);
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); i++)
    ab += (a[i] - ma) * (b[i] - mb), aa += (a[i] - ma) * (a[i] - ma), bb += (b[i] - mb) * (b[i] - mb);
  return ab / std::sqrt(aa * bb) * std::sqrt(double(a.size()));
}

void test_statistics() {
  constexpr int kRows = 512, kCols = 512;
  for (float p : {0.01f, 0.1f, 0.5f, 0.9f}) {
    const std::vector<float> a = kept(p, 7, 1, 0, kRows, kCols);
    const double deviation = std::sqrt(p / (1. - p) / (kRows * kCols));  // of the mean of kept, scaled entries: 1
    EXPECT(std::abs(mean(a) - 1.) < 5 * deviation + 1e-4, "p ", p, ": mean ", mean(a));
    for (int lag : {1, 2, 8, 16, 32, kCols, 8 * kCols, 8 * kCols + 32}) {
      const std::vector<float> first(a.begin(), a.end() - lag), second(a.begin() + lag, a.end());
      EXPECT(std::abs(correlation(first, second)) < 5, "p ", p, " lag ", lag, ": ", correlation(first, second));
    }
    EXPECT(std::abs(correlation(a, kept(p, 8, 1, 0, kRows, kCols))) < 5, "another seed");
    EXPECT(std::abs(correlation(a, kept(p, 7 + (int64_t(1) << 40), 1, 0, kRows, kCols))) < 5, "another high seed");
    EXPECT(std::abs(correlation(a, kept(p, 7, 2, 0, kRows, kCols))) < 5, "another offset");
    EXPECT(std::abs(correlation(a, kept(p, 7, 1, 1, kRows, kCols))) < 5, "another head");
  }
}

void test_ends() {
  const int64_t state[] = {1, 2};
  EXPECT(mean(kept(0.f, 1, 2, 0, 64, 64)) == 1., "p = 0 keeps all");
  EXPECT(Dropout::of(0.5f, state).threshold == 16384 && Dropout::of(0.5f, state).scale == 2.f, "p = 0.5");
}

}  // namespace

int main() {
  test_published_vectors();
  test_rows();
  test_entries_of_call();
  test_pairs_of_words();
  test_two_at_once();
  test_all_halves();
  test_entries_together();
  test_statistics();
  test_ends();
  return flash::test::finish("dropout");
}
