// The polynomials of the sm_90 forward's softcap against tanh, and the units they give.
#include <cmath>

#include "expect.h"
#include "sm90/fwd_softcap.h"

using namespace flash;
using namespace flash::sm90;

namespace {

template <class Tanh>
void test_error() {
  for (float softcap : {0.1f, 5.f, 30.f, 1000.f})
    for (float scale : {1.f, 1.44f * softcap}) {
      const float x_per_qk = 0.125f / softcap;
      const auto cap = Softcap<Tanh>::of(x_per_qk, scale);
      for (int i = -1000; i <= 1000; i++) {
        const float qk = i / 1000.f * Tanh::kBound / x_per_qk, square = qk * qk;
        const double want = scale * std::tanh(double(qk) * x_per_qk), got = double(qk) * cap.factor(square);
        EXPECT(std::abs(got - want) <= (Tanh::kError + 1e-6) * std::abs(want), softcap, " ", qk, ": ", got, " ", want);
        EXPECT(square <= cap.max_square * 1.00001f, "inside the bound");
      }
      const float outside = 1.001f * Tanh::kBound / x_per_qk;
      EXPECT(outside * outside > cap.max_square, "outside the bound");
    }
}

// Whatever softcap: a polynomial serves what it can, and makes no NaN of a score of 0.
template <class Tanh>
void test_extremes() {
  for (float softcap : {1e-30f, 1e-12f, 1e-6f, 1e-4f, 1e6f, 1e30f})
    for (float softmax_scale : {1e-3f, 0.125f, 1.f, 100.f}) {
      const auto cap = Softcap<Tanh>::of(softmax_scale / softcap, 1.44f * softcap);
      const bool serves_zero = 0.f <= cap.max_square;
      EXPECT(!serves_zero || std::isfinite(cap.factor(0.f)), softcap, " ", softmax_scale);
      EXPECT(serves_zero || softcap < 1e-2f * softmax_scale, softcap, " ", softmax_scale, " is served");
    }
}

void test_args() {
  AttnParams p;
  p.softmax_scale = 0.125f;
  p.softcap = 20.f;
  const SoftcapArgs args = SoftcapArgs::of(p, 30.f);
  const float qk = 16.f, tanh = std::tanh(0.1f);
  EXPECT(std::abs(qk * args.exponent_line.factor(qk * qk) - 30.f * tanh) <= 1e-4f, "line");
  EXPECT(std::abs(qk * args.exponent_short.factor(qk * qk) - 30.f * tanh) <= 1e-4f, "short");
  EXPECT(std::abs(qk * args.exponent_long.factor(qk * qk) - 30.f * tanh) <= 1e-4f, "long");
  EXPECT(std::abs(qk * args.tanh_long.factor(qk * qk) - tanh) <= 1e-5f, "in place");
  EXPECT(args.exponent_line.max_square < args.exponent_short.max_square &&
             args.exponent_short.max_square < args.exponent_long.max_square,
         "in order of size");

  const float slopes[1] = {1.f};
  for (float softcap : {1.f, 15.f, 50.f}) {
    p.softcap = softcap;
    const SoftcapArgs alone = SoftcapArgs::of(p, 1.f);
    p.alibi_slopes = slopes;
    const SoftcapArgs added_to = SoftcapArgs::of(p, 1.f);
    p.alibi_slopes = nullptr;
    EXPECT(added_to.tanh_long.max_square <= alone.tanh_long.max_square, "the polynomial serves fewer");
    const float largest = std::sqrt(added_to.tanh_long.max_square);
    for (int i = 0; i <= 1000; i++) {
      const float q_k = i / 1000.f * largest;
      const double want = softcap * std::tanh(double(q_k) * added_to.x_per_qk);
      const double got = double(softcap) * q_k * added_to.tanh_long.factor(q_k * q_k);
      EXPECT(std::abs(got - want) <= SoftcapArgs::kMaxError * 1.1, softcap, " ", q_k, ": ", got, " ", want);
    }
  }
}

}  // namespace

int main() {
  test_error<TanhLine>();
  test_error<TanhShort>();
  test_error<TanhLong>();
  test_extremes<TanhLine>();
  test_extremes<TanhShort>();
  test_extremes<TanhLong>();
  test_args();
  return flash::test::finish("softcap");
}
