// attn/score.h against the formula in double, its derivative against differences, and the ends of the range.
#include "attn/score.h"

#include <cfloat>
#include <limits>

#include "expect.h"

using namespace flash;

namespace {

double exact(const ScoreMod& mod, double qk, int distance, double bias) {
  double s = qk * mod.softmax_scale;
  if (mod.softcap != 0.f) s = mod.softcap * std::tanh(s / mod.softcap);
  return s - double(mod.alibi_slope) * distance + bias;
}

void test_formula() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float softcap : {0.f, 1.f, 15.f, 50.f})
    for (float slope : {0.f, 0.25f, 2.f})
      for (int i = 0; i < 500; i++) {
        const ScoreMod mod{0.125f, softcap, slope};
        const float qk = normal(random) * 100.f, bias = normal(random);
        const int distance = i % 40;
        const double want = exact(mod, qk, distance, bias);
        EXPECT(std::abs(mod(qk, distance, bias) - want) <= 1e-5 * (1. + std::abs(want)), qk, " ", want);

        const double h = 1e-4, difference = (exact(mod, qk + h, 0, 0) - exact(mod, qk - h, 0, 0)) / (2 * h);
        EXPECT(std::abs(mod.derivative(qk) * mod.softmax_scale - difference) <= 1e-5, qk, " ", difference);
      }
}

void test_ends_of_the_range() {
  const float inf = std::numeric_limits<float>::infinity();
  for (float softcap : {0.f, 10.f}) {
    const ScoreMod mod{0.125f, softcap, 0.5f};
    EXPECT(mod(30.f, 3, -inf) == -inf, "-inf masks");
    EXPECT(std::isfinite(mod(-1e6f, 1000, -FLT_MAX)), "a finite bias is not a mask");
    EXPECT(std::isfinite(mod(1e30f, 0, 0.f)) && std::isfinite(mod(-1e30f, 0, 0.f)), "large logits stay finite");
    EXPECT(mod.derivative(1e30f) == (softcap == 0.f ? 1.f : 0.f), "saturated");
  }
}

// What units the softmax gets: the factor is applied once, before it or by it, and what is left is positive.
void test_units() {
  const float slopes[] = {1.f};
  for (float scale : {0.125f, 0.f, -1.f})
    for (float softcap : {0.f, 30.f})
      for (bool adds : {false, true}) {
        AttnParams p;
        p.softmax_scale = scale;
        p.softcap = softcap;
        p.alibi_slopes = adds ? slopes : nullptr;
        const ScoreUnits units = ScoreUnits::of(p);
        EXPECT(units.factor == (softcap != 0.f ? softcap : scale) && units.to_natural > 0.f, scale, " ", softcap);
        EXPECT((units.is_applied ? 1.f : units.factor) == units.to_natural && (!adds || units.is_applied), adds);
      }
}

void test_slopes() {
  const float slopes[] = {1.f, 2.f, 3.f, 4.f};
  AttnParams p;
  p.alibi_slopes = slopes;
  EXPECT(ScoreMod::of(p, 1, 1).alibi_slope == 2.f, "(num_heads)");
  p.alibi_batch_stride = 2;
  EXPECT(ScoreMod::of(p, 1, 1).alibi_slope == 4.f, "(batch, num_heads)");
  p.alibi_slopes = nullptr;
  EXPECT(ScoreMod::of(p, 1, 1).alibi_slope == 0.f, "off");
}

}  // namespace

int main() {
  test_formula();
  test_ends_of_the_range();
  test_units();
  test_slopes();
  return flash::test::finish("score");
}
