// cpu/element.h: conversions of 16-bit types, all of them where they can be counted.
#include "cpu/element.h"

#include <vector>

#include "expect.h"

using namespace flash::cpu;

namespace {

// The value of a half by definition.
double value_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double magnitude = exponent == 0    ? std::ldexp(mantissa, -24)
                           : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                            : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

double value_of_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

template <class T>
void test_every_value(double (*value_of)(uint16_t)) {
  for (uint32_t bits = 0; bits < 65536; bits++) {
    const T x{uint16_t(bits)};
    const double value = value_of(x.bits);
    const float got = to_float(x);
    EXPECT(std::isnan(value) ? std::isnan(got) : got == value && std::signbit(got) == std::signbit(value), bits);
    const T back = from_float<T>(got);
    EXPECT(std::isnan(value) ? std::isnan(to_float(back)) : back.bits == x.bits, bits, " came back as ", back.bits);
  }
}

// Rounding of every float between two neighbours follows from the points around their middle.
template <class T>
void test_rounding(double (*value_of)(uint16_t), uint16_t infinity) {
  for (uint32_t bits = 0; bits < infinity; bits++) {
    const double low = value_of(uint16_t(bits));
    const double high = bits + 1 == infinity ? 2 * low - value_of(uint16_t(bits - 1)) : value_of(uint16_t(bits + 1));
    const float middle = float((low + high) / 2);  // exact: one more bit
    const uint32_t even = bits % 2 ? bits + 1 : bits;
    for (float sign : {1.f, -1.f}) {
      const auto rounded = [&](float x) { return from_float<T>(sign * x).bits & 0x7FFFu; };
      EXPECT(rounded(middle) == even, "halfway above ", bits, ": ", rounded(middle));
      EXPECT(rounded(std::nextafter(middle, 0.f)) == bits, "below halfway above ", bits);
      EXPECT(rounded(std::nextafter(middle, INFINITY)) == bits + 1, "above halfway above ", bits);
    }
  }
  EXPECT(to_float(from_float<T>(INFINITY)) == INFINITY && to_float(from_float<T>(-INFINITY)) == -INFINITY, "infinity");
  EXPECT(std::isnan(to_float(from_float<T>(std::bit_cast<float>(0x7F800001u)))), "a NaN of low bits only");
  EXPECT(std::isnan(to_float(from_float<T>(std::bit_cast<float>(0xFFFFFFFFu)))), "a NaN of all bits");
}

}  // namespace

int main() {
  test_every_value<Half>(value_of_half);
  test_every_value<BFloat16>(value_of_bfloat16);
  test_rounding<Half>(value_of_half, 0x7C00);
  test_rounding<BFloat16>(value_of_bfloat16, 0x7F80);
  return flash::test::finish("element");
}
