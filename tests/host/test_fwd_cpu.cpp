// cpu/fwd_cpu.cpp against plain loops in double.
#include "api.h"
#include "expect.h"
#include "problem.h"

using namespace flash;
using namespace flash::test;

namespace {

template <class T>
void test_every_feature(double tolerance) {
  int seed = 0;
  for (const Shape& shape : shapes()) {
    Problem<T> problem(shape, ++seed);
    fwd_cpu(problem.fwd(), 3);
    const Expected want = problem.expected();
    EXPECT(error(problem.out, want.out) <= tolerance, shape.text(), " out: ", error(problem.out, want.out));
    for (size_t i = 0; i < want.lse.size(); i++) {
      const double got = problem.lse[i], bound = 1e-5 * std::max(1., std::abs(want.lse[i]));
      EXPECT(got == want.lse[i] || std::abs(got - want.lse[i]) <= bound, shape.text(), " lse ", got, " ", want.lse[i]);
    }
  }
}

void test_same_bits_for_any_number_of_threads() {
  for (const Shape& shape : shapes()) {
    Problem<float> one(shape, 5), many(shape, 5);
    fwd_cpu(one.fwd(), 1);
    fwd_cpu(many.fwd(), 7);
    EXPECT(one.out == many.out && one.lse == many.lse, shape.text());
  }
}

// Keys and values past the used length may be anything.
void test_unused_memory_is_not_read() {
  Shape shape{.batch = 2, .seqlen_q = 70, .seqlen_k = 100, .seqused_k = {65, 3}};
  Problem<float> clean(shape, 1), dirty(shape, 1);
  for (int b = 0; b < 2; b++)
    for (int i = shape.seqused_k[b] * 8; i < 100 * 8; i++) dirty.k[b * 800 + i] = dirty.v[b * 800 + i] = NAN;
  fwd_cpu(clean.fwd(), 2);
  fwd_cpu(dirty.fwd(), 2);
  EXPECT(clean.out == dirty.out && clean.lse == dirty.lse, "NaN behind the used keys");
}

// One row of memory seen many times: strides of 0.
void test_expanded_heads_and_rows() {
  const Shape shape{.seqlen_q = 70, .seqlen_k = 33, .num_heads = 4, .num_heads_kv = 4};
  Problem<float> expanded(shape, 2), copied(shape, 2);
  FwdParams p = expanded.fwd();
  p.k.head = p.v.head = 0;  // all heads are head 0
  p.v.row = 0;              // all values are value 0
  for (int j = 0; j < 33; j++)
    for (int h = 0; h < 4; h++)
      for (int d = 0; d < 8; d++)
        copied.k[(j * 4 + h) * 8 + d] = copied.k[j * 32 + d], copied.v[(j * 4 + h) * 8 + d] = copied.v[d];
  fwd_cpu(p, 2);
  fwd_cpu(copied.fwd(), 2);
  EXPECT(expanded.out == copied.out && expanded.lse == copied.lse, "stride 0");
}

void test_ends_of_the_range() {
  // One key, logit -524288: the output is the value, lse is the logit.
  Problem<cpu::BFloat16> low({.head_dim = 64, .softmax_scale = 1.f}, 3);
  low.q.assign(64, cpu::from_float<cpu::BFloat16>(1024.f));
  low.k.assign(64, cpu::from_float<cpu::BFloat16>(-8.f));
  fwd_cpu(low.fwd(), 1);
  EXPECT(low.lse[0] == -524288.f, low.lse[0]);
  for (int d = 0; d < 8; d++) EXPECT(low.out[d].bits == low.v[d].bits, "out = v");

  // A bias of the lowest finite number is no mask; -inf is one.
  const Shape shape{.seqlen_q = 2, .seqlen_k = 100, .bias = true};
  Problem<float> biased(shape, 4), plain(Shape{.seqlen_q = 2, .seqlen_k = 100}, 4);
  std::fill(biased.q.begin(), biased.q.end(), 0.f);
  std::fill_n(biased.bias.begin(), 100, -std::numeric_limits<float>::max());
  std::fill_n(biased.bias.begin() + 100, 100, -INFINITY);
  fwd_cpu(biased.fwd(), 1);
  double mean = 0;
  for (int j = 0; j < 100; j++) mean += biased.v[j * 8] / 100.;
  EXPECT(std::abs(biased.out[0] - mean) < 1e-6, "equal finite scores: ", biased.out[0], " ", mean);
  EXPECT(biased.out[8] == 0.f && biased.lse[1] == -INFINITY, "all scores -inf: ", biased.out[8], " ", biased.lse[1]);
}

void test_errors() {
  Problem<float> problem({}, 1);
  const auto error = [&](auto change, int threads = 1) {
    FwdParams p = problem.fwd();
    change(p);
    return error_of<std::invalid_argument>([&] { fwd_cpu(p, threads); });
  };
  EXPECT(error([](FwdParams&) {}).empty(), "nothing wrong");
  EXPECT(contains(error([](FwdParams&) {}, 0), "threads"), "threads");
  EXPECT(contains(error([](FwdParams& p) { p.dtype = DType::kE4M3; }), "dtype"), "dtype");
  EXPECT(contains(error([](FwdParams& p) { p.num_heads_kv = 0; }), "num_heads"), "no kv heads");
  EXPECT(contains(error([](FwdParams& p) { p.num_heads = 3, p.num_heads_kv = 2; }), "num_heads"), "3 heads on 2");
  EXPECT(contains(error([](FwdParams& p) { p.head_dim = 0; }), "head_dim"), "head_dim");
  EXPECT(contains(error([](FwdParams& p) { p.window_left = -2; }), "window_size"), "window_size");
  EXPECT(contains(error([](FwdParams& p) { p.dropout_p = 1.f; }), "dropout_p"), "dropout_p");
  EXPECT(contains(error([](FwdParams& p) { p.dropout_p = 0.5f, p.rng_state = nullptr; }), "rng_state"), "rng_state");
  EXPECT(contains(error([](FwdParams& p) { p.batch = -1; }), "batch"), "batch");
}

}  // namespace

int main() {
  test_every_feature<float>(2e-6);
  test_every_feature<cpu::Half>(4e-4);
  test_every_feature<cpu::BFloat16>(3e-3);
  test_same_bits_for_any_number_of_threads();
  test_unused_memory_is_not_read();
  test_expanded_heads_and_rows();
  test_ends_of_the_range();
  test_errors();
  return finish("fwd_cpu");
}
