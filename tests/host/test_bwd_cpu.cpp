// cpu/bwd_cpu.cpp and cpu/dbias.h against plain loops in double.
#include "api.h"
#include "expect.h"
#include "problem.h"

using namespace flash;
using namespace flash::test;

namespace {

template <class T>
void run(Problem<T>& problem, int threads) {
  fwd_cpu(problem.fwd(), threads);
  bwd_cpu(problem.bwd(), threads);
}

template <class T>
void test_every_feature(double tolerance) {
  int seed = 0;
  for (const Shape& shape : shapes()) {
    Problem<T> problem(shape, ++seed);
    run(problem, 3);
    const Expected want = problem.expected();
    EXPECT(error(problem.dq, want.dq) <= tolerance, shape.text(), " dq: ", error(problem.dq, want.dq));
    EXPECT(error(problem.dk, want.dk) <= tolerance, shape.text(), " dk: ", error(problem.dk, want.dk));
    EXPECT(error(problem.dv, want.dv) <= tolerance, shape.text(), " dv: ", error(problem.dv, want.dv));
    if (shape.bias) EXPECT(error(problem.dbias, want.dbias) <= tolerance, shape.text(), " dbias");
  }
}

// Tasks wait for each other's part of dq: with many more workers than cores they are interrupted anywhere.
void test_same_bits_for_any_schedule() {
  for (const Shape& shape : shapes()) {
    Problem<float> one(shape, 5);
    run(one, 1);
    for (int threads : {2, 7, 32}) {
      Problem<float> many(shape, 5);
      run(many, threads);
      EXPECT(one.dq == many.dq && one.dk == many.dk && one.dv == many.dv && one.dbias == many.dbias, shape.text());
    }
  }
  const Shape large{.seqlen_q = 700, .seqlen_k = 900, .num_heads = 2, .head_dim = 32, .window_right = 0};
  Problem<float> one(large, 6);
  run(one, 1);
  for (int repeat = 0; repeat < 20; repeat++) {
    Problem<float> many(large, 6);
    run(many, 9);
    EXPECT(one.dq == many.dq && one.dk == many.dk && one.dv == many.dv, "run ", repeat);
  }
}

void test_delta() {
  Problem<float> problem({.seqlen_q = 70, .seqlen_k = 40, .num_heads = 2, .window_right = 0, .dlse = true}, 7);
  run(problem, 2);
  for (int h = 0; h < 2; h++)
    for (int i = 0; i < 70; i++) {
      const int at = h * 70 + i;
      double want = -problem.dlse[at];
      for (int d = 0; d < 8; d++) want += double(problem.dout[(i * 2 + h) * 8 + d]) * problem.out[(i * 2 + h) * 8 + d];
      if (problem.lse[at] == -INFINITY) want = 0;  // the first 30 rows see no key
      EXPECT(std::abs(problem.delta[at] - want) < 1e-5, "row ", i, ": ", problem.delta[at], " ", want);
    }
}

// A gradient of -inf's derivative must not come back as NaN.
void test_rows_without_keys_take_no_gradient() {
  Problem<float> problem({.seqlen_q = 9, .seqlen_k = 4, .window_right = 0, .dlse = true}, 8);
  for (int i = 0; i < 5; i++) problem.dlse[i] = NAN;
  run(problem, 1);
  for (float x : problem.dk) EXPECT(std::isfinite(x), "dk");
  for (int i = 0; i < 5 * 8; i++) EXPECT(problem.dq[i] == 0.f, "dq of a row without keys");
}

// The bias' gradient for every way of broadcasting it: sums of the gradient of the whole bias.
void test_broadcast_bias() {
  constexpr int kBatch = 2, kHeads = 2, kQ = 70, kK = 90;
  const Shape shape{.batch = kBatch, .seqlen_q = kQ, .seqlen_k = kK, .num_heads = kHeads, .bias = true};
  for (int mask = 0; mask < 16; mask++) {
    const int sizes[] = {mask & 1 ? kBatch : 1, mask & 2 ? kHeads : 1, mask & 4 ? kQ : 1, mask & 8 ? kK : 1};
    const int64_t strides[] = {mask & 1 ? int64_t(sizes[1]) * sizes[2] * sizes[3] : 0,
                               mask & 2 ? int64_t(sizes[2]) * sizes[3] : 0, mask & 4 ? sizes[3] : 0, mask & 8 ? 1 : 0};
    const auto gradient = [&](const int64_t (&s)[4], size_t size, int threads) {
      Problem<float> problem(shape, 9);
      std::fill(problem.bias.begin(), problem.bias.end(), 0.5f);  // the same bias however it is broadcast
      fwd_cpu(problem.fwd(), threads);
      std::vector<float> dbias(size, 0.f);
      BwdParams p = problem.bwd();
      p.dbias = {dbias.data(), s[0], s[1], s[2], s[3], true};
      bwd_cpu(p, threads);
      return dbias;
    };
    const int64_t whole_strides[] = {kHeads * kQ * kK, kQ * kK, kK, 1};
    const std::vector<float> whole = gradient(whole_strides, kBatch * kHeads * kQ * kK, 1);
    const size_t size = size_t(sizes[0]) * sizes[1] * sizes[2] * sizes[3];
    const std::vector<float> got = gradient(strides, size, 3);
    std::vector<double> want(size, 0.);
    for (int b = 0; b < kBatch; b++)
      for (int h = 0; h < kHeads; h++)
        for (int i = 0; i < kQ; i++)
          for (int j = 0; j < kK; j++)
            want[b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3]] +=
                whole[((b * kHeads + h) * kQ + i) * kK + j];
    for (size_t i = 0; i < size; i++)
      EXPECT(std::abs(got[i] - want[i]) < 1e-4, "dims ", mask, " at ", i, ": ", got[i], " ", want[i]);
    EXPECT(gradient(strides, size, 8) == got, "dims ", mask, ": the same bits");
  }
}

}  // namespace

int main() {
  test_every_feature<float>(1e-5);
  test_every_feature<cpu::Half>(3e-3);
  test_every_feature<cpu::BFloat16>(2e-2);
  test_same_bits_for_any_schedule();
  test_delta();
  test_rows_without_keys_take_no_gradient();
  test_broadcast_bias();
  return finish("bwd_cpu");
}
