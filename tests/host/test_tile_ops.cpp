// cpu/tile_ops.h: every instruction set of this processor against plain loops in double.
#include "cpu/tile_ops.h"

#include <cfloat>

#include "expect.h"

using namespace flash::cpu;

namespace {

std::mt19937 random_bits(1);

std::vector<float> normal(int size) {
  std::normal_distribution<float> distribution;
  std::vector<float> x(size);
  for (float& value : x) value = distribution(random_bits);
  return x;
}

// Every number of rows, so that every size of register tile occurs; a as it is and transposed.
void test_matmul(const TileOps& ops) {
  constexpr int kLd = 80, kMax = 64;
  const std::vector<float> a = normal(kMax * kLd), b = normal(kMax * kLd), before = normal(kMax * kLd);
  for (int m = 1; m <= 27; m++)
    for (int n : {16, 48})
      for (int k : {0, 1, 7, 64})
        for (bool transpose : {false, true})
          for (bool accumulate : {false, true}) {
            std::vector<float> c = before;
            Tile tile_a{const_cast<float*>(a.data()), kLd}, tile_b{const_cast<float*>(b.data()), kLd};
            const View view = transpose ? transposed(tile_a) : View(tile_a);
            ops.matmul({c.data(), kLd}, view, tile_b, {m, n, k}, {0.5f, accumulate});
            for (int row = 0; row < kMax; row++)
              for (int col = 0; col < kLd; col++) {
                double want = before[row * kLd + col];
                if (row < m && col < n) {
                  want = accumulate ? want : 0.;
                  for (int i = 0; i < k; i++)
                    want += 0.5 * a[transpose ? i * kLd + row : row * kLd + i] * double(b[i * kLd + col]);
                }
                EXPECT(std::abs(c[row * kLd + col] - want) <= 2e-5, m, " ", n, " ", k, " at ", row, " ", col);
              }
          }
}

// An element's bits do not depend on where in the tile it is, nor on which operand is transposed: backward relies on
// it.
void test_matmul_is_the_same_everywhere(const TileOps& ops) {
  constexpr int kRows = 64, kDim = 72;
  std::vector<float> q = normal(kRows * kDim), k = normal(kRows * kDim), q_t(kRows * kDim), k_t(kRows * kDim);
  for (int r = 0; r < kRows; r++)
    for (int d = 0; d < kDim; d++) q_t[d * kRows + r] = q[r * kDim + d], k_t[d * kRows + r] = k[r * kDim + d];
  for (int m = 1; m <= kRows; m += 3) {
    std::vector<float> scores(kRows * kRows), scores_t(kRows * kRows);
    ops.matmul({scores.data(), kRows}, Tile{q.data(), kDim}, {k_t.data(), kRows}, {m, kRows, kDim}, {0.3f, false});
    ops.matmul({scores_t.data(), kRows}, Tile{k.data(), kDim}, {q_t.data(), kRows}, {kRows, kRows, kDim},
               {0.3f, false});
    for (int i = 0; i < m; i++)
      for (int j = 0; j < kRows; j++) EXPECT(scores[i * kRows + j] == scores_t[j * kRows + i], i, " ", j);
  }
}

// exp, through the function that does nothing else: exp(x - 0).
void test_exp(const TileOps& ops) {
  const std::vector<float> zero(kBlockM, 0.f);
  double worst = 0;
  for (float x = 0.f; x > -87.3f; x = std::min(x - 1e-7f, std::nextafter(x * 1.00001f, -100.f))) {
    std::vector<float> tile(kBlockN, x);
    ops.exp_minus_lse(tile.data(), 1, kPad, zero.data());
    const double want = std::exp(double(x)), ulp = std::nextafter(float(want), 2.f) - double(float(want));
    worst = std::max(worst, std::abs(tile[0] - want) / ulp);
  }
  EXPECT(worst <= 1.0, "exp is off by ", worst, " units in the last place");

  const float cases[][2] = {{-INFINITY, 0.f}, {-FLT_MAX, 0.f}, {-88.f, 0.f}, {-200.f, 0.f}, {0.f, 1.f}, {-0.f, 1.f}};
  for (const auto& [x, want] : cases) {
    std::vector<float> tile(kBlockN, x);
    ops.exp_minus_lse(tile.data(), 1, kPad, zero.data());
    EXPECT(tile[0] == want, "exp(", x, ") = ", tile[0]);
  }
  std::vector<float> tile(kBlockN, NAN);
  ops.exp_minus_lse(tile.data(), 1, kPad, zero.data());
  EXPECT(std::isnan(tile[0]), "NaN is not hidden");
}

// Two tiles of keys after another: row_max, row_sum and the rescaled probabilities are those of all keys at once.
void test_online_softmax(const TileOps& ops) {
  constexpr int kKeys = 40;
  for (float masked : {0.f, 0.5f, 1.f}) {
    std::vector<float> scores = normal(2 * kKeys * kBlockM);
    for (float& s : scores) s = std::uniform_real_distribution<float>()(random_bits) < masked ? -INFINITY : s * 20.f;
    std::vector<float> probs = scores, row_max(kBlockM, -INFINITY), row_sum(kBlockM, 0.f), rescale(kBlockM);
    std::vector<float> seen(kBlockM, 0.f);  // sum of probabilities, rescaled as an output is
    for (int tile = 0; tile < 2; tile++) {
      float* const p = probs.data() + tile * kKeys * kBlockM;
      ops.online_softmax(p, kKeys, kBlockM, row_max.data(), row_sum.data(), rescale.data());
      for (int i = 0; i < kBlockM; i++) {
        seen[i] *= rescale[i];
        for (int j = 0; j < kKeys; j++) seen[i] += p[j * kBlockM + i];
      }
    }
    for (int i = 0; i < kBlockM; i++) {
      double highest = -INFINITY, sum = 0;
      for (int j = 0; j < 2 * kKeys; j++) highest = std::max(highest, double(scores[j * kBlockM + i]));
      for (int j = 0; j < 2 * kKeys; j++)
        if (highest > -INFINITY) sum += std::exp(scores[j * kBlockM + i] - highest);
      EXPECT(row_max[i] == highest, "row ", i);
      EXPECT(std::abs(row_sum[i] - sum) <= 1e-5 * sum && std::abs(seen[i] - sum) <= 1e-5 * sum, row_sum[i], " ", sum);
    }
  }
}

void test_rest(const TileOps& ops) {
  const std::vector<float> a = normal(kBlockM * kBlockN), b = normal(kBlockM * kBlockN), rows = normal(kBlockM);
  std::vector<float> scaled = a, gradient = b;
  ops.scale_rows(scaled.data(), 5, kBlockN, rows.data());
  ops.softmax_backward(gradient.data(), a.data(), 7, 48, rows.data());
  for (int i = 0; i < kBlockM; i++)
    for (int j = 0; j < kBlockN; j++) {
      const int at = i * kBlockN + j;
      EXPECT(scaled[at] == (i < 5 ? a[at] * rows[i] : a[at]), "scale_rows");
      EXPECT(std::abs(gradient[at] - (i < 7 && j < 48 ? a[at] * (b[at] - rows[i]) : b[at])) < 1e-6, "softmax_backward");
    }

  std::vector<Half> half(65536);
  std::vector<BFloat16> bfloat16(65536);
  for (uint32_t i = 0; i < 65536; i++) half[i].bits = bfloat16[i].bits = uint16_t(i);
  std::vector<float> from_half(65535), from_bfloat16(65535);  // an odd number
  ops.half_to_floats(from_half.data(), half.data(), 65535);
  ops.bfloat16_to_floats(from_bfloat16.data(), bfloat16.data(), 65535);
  for (uint32_t i = 0; i < 65535; i++) {
    EXPECT(std::bit_cast<uint32_t>(from_half[i]) == std::bit_cast<uint32_t>(to_float(half[i])), "half ", i);
    EXPECT(std::bit_cast<uint32_t>(from_bfloat16[i]) == std::bit_cast<uint32_t>(to_float(bfloat16[i])), "bfloat16 ", i);
  }
}

}  // namespace

int main() {
  for (const TileOps* ops : usable_tile_ops()) {
    test_matmul(*ops);
    test_matmul_is_the_same_everywhere(*ops);
    test_exp(*ops);
    test_online_softmax(*ops);
    test_rest(*ops);
  }
  return flash::test::finish("tile_ops");
}
