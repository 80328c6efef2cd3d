// An attention problem in memory of its own, its parameters, and its results by plain loops in double.
#pragma once

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "attn/dropout.h"
#include "attn/seqlen.h"
#include "check.h"
#include "cpu/element.h"
#include "params.h"

namespace flash::test {

struct Shape {
  int batch = 1, seqlen_q = 1, seqlen_k = 1, num_heads = 1, num_heads_kv = 1, head_dim = 8, head_dim_v = 8;
  int window_left = -1, window_right = -1;
  std::vector<int32_t> cu_seqlens_q = {}, cu_seqlens_k = {}, seqused_k = {};  // packed: seqlens are those of memory
  float softmax_scale = 0.3f, softcap = 0.f, dropout_p = 0.f;
  bool alibi = false, bias = false, sinks = false, dlse = false;
  std::string text() const {
    return message("(batch ", batch, " seqlens ", seqlen_q, " ", seqlen_k, " heads ", num_heads, " ", num_heads_kv,
                   " dims ", head_dim, " ", head_dim_v, " window ", window_left, " ", window_right,
                   cu_seqlens_q.empty() ? "" : " packed", seqused_k.empty() ? "" : " seqused", " softcap ", softcap,
                   " dropout ", dropout_p, alibi ? " alibi" : "", bias ? " bias" : "", sinks ? " sinks" : "",
                   dlse ? " dlse" : "", ")");
  }
};

template <class T>
constexpr DType dtype_of() {
  return sizeof(T) == 4 ? DType::kF32 : std::is_same_v<T, cpu::Half> ? DType::kF16 : DType::kBF16;
}

// Results in double, one value per element of the tensor of that name.
struct Expected {
  std::vector<double> out, lse, dq, dk, dv, dbias;
};

template <class T>
class Problem {
 public:
  Problem(const Shape& shape, int seed) : shape_(shape), random_(seed) {
    const Shape& s = shape_;
    rows_q_ = int64_t(s.cu_seqlens_q.empty() ? s.batch : 1) * s.seqlen_q;
    rows_k_ = int64_t(s.cu_seqlens_k.empty() ? s.batch : 1) * s.seqlen_k;
    q = normal<T>(rows_q_ * s.num_heads * s.head_dim), k = normal<T>(rows_k_ * s.num_heads_kv * s.head_dim);
    v = normal<T>(rows_k_ * s.num_heads_kv * s.head_dim_v), dout = normal<T>(rows_q_ * s.num_heads * s.head_dim_v);
    const T poison = cpu::from_float<T>(std::numeric_limits<float>::quiet_NaN());
    out.assign(dout.size(), poison), dq.assign(q.size(), poison), dk.assign(k.size(), poison),
        dv.assign(v.size(), poison);
    lse.assign(rows_q_ * s.num_heads, NAN), delta = lse;
    dlse = normal<float>(lse.size()), slopes = normal<float>(s.num_heads), sinks = normal<float>(s.num_heads);
    bias = normal<float>(int64_t(s.num_heads) * s.seqlen_q * s.seqlen_k);  // shared by the batch
    dbias.assign(bias.size(), 0.f);
    for (float& slope : slopes) slope = std::abs(slope);
  }

  FwdParams fwd() const { return common<FwdParams>(); }

  BwdParams bwd() {
    BwdParams p = common<BwdParams>();
    const Shape& s = shape_;
    p.dout = strided(dout, s.cu_seqlens_q, s.seqlen_q, s.num_heads, s.head_dim_v);
    p.dq = strided(dq, s.cu_seqlens_q, s.seqlen_q, s.num_heads, s.head_dim);
    p.dk = strided(dk, s.cu_seqlens_k, s.seqlen_k, s.num_heads_kv, s.head_dim);
    p.dv = strided(dv, s.cu_seqlens_k, s.seqlen_k, s.num_heads_kv, s.head_dim_v);
    p.delta = stats(delta);
    if (s.dlse) p.dlse = stats(dlse);
    if (s.bias) p.dbias = {dbias.data(), 0, p.bias.head, p.bias.row, 1, true};
    return p;
  }

  // Every number by its definition; P is kept whole, one row at a time.
  Expected expected() const {
    const Shape& s = shape_;
    const FwdParams p = fwd();
    Expected e{std::vector<double>(out.size(), 0.), std::vector<double>(lse.size(), -INFINITY),
               std::vector<double>(q.size(), 0.),   std::vector<double>(k.size(), 0.),
               std::vector<double>(v.size(), 0.),   std::vector<double>(bias.size(), 0.)};
    for (int b = 0; b < s.batch; b++)
      for (int h = 0; h < s.num_heads; h++)
        for (int i = 0; i < SeqInfo::of(p, b).seqlen_q; i++) add_row(p, b, h, i, e);
    return e;
  }

  std::vector<T> q, k, v, out, dout, dq, dk, dv;
  std::vector<float> lse, delta, dlse, slopes, sinks, bias, dbias;

 private:
  template <class U>
  std::vector<U> normal(int64_t size) {
    std::normal_distribution<float> distribution;
    std::vector<U> x(size);
    for (U& value : x) value = cpu::from_float<U>(distribution(random_));
    return x;
  }

  template <class U>
  static Strided strided(const std::vector<U>& x, const std::vector<int32_t>& cu, int seqlen, int heads, int dim) {
    return {const_cast<U*>(x.data()), cu.empty() ? int64_t(seqlen) * heads * dim : 0, int64_t(heads) * dim, dim};
  }

  RowStats stats(const std::vector<float>& x) const {  // (batch, heads, seqlen_q) or (heads, total_q)
    const int64_t row = shape_.seqlen_q;
    return {const_cast<float*>(x.data()), shape_.cu_seqlens_q.empty() ? shape_.num_heads * row : 0, row};
  }

  template <class Params>
  Params common() const {
    const Shape& s = shape_;
    Params p;
    p.dtype = dtype_of<T>();
    p.batch = s.batch, p.seqlen_q = s.seqlen_q, p.seqlen_k = s.seqlen_k, p.total_q = rows_q_, p.total_k = rows_k_;
    p.num_heads = s.num_heads, p.num_heads_kv = s.num_heads_kv, p.head_dim = s.head_dim, p.head_dim_v = s.head_dim_v;
    p.q = strided(q, s.cu_seqlens_q, s.seqlen_q, s.num_heads, s.head_dim);
    p.k = strided(k, s.cu_seqlens_k, s.seqlen_k, s.num_heads_kv, s.head_dim);
    p.v = strided(v, s.cu_seqlens_k, s.seqlen_k, s.num_heads_kv, s.head_dim_v);
    p.out = strided(out, s.cu_seqlens_q, s.seqlen_q, s.num_heads, s.head_dim_v);
    p.lse = stats(lse);
    if (!s.cu_seqlens_q.empty()) p.cu_seqlens_q = s.cu_seqlens_q.data();
    if (!s.cu_seqlens_k.empty()) p.cu_seqlens_k = s.cu_seqlens_k.data();
    if (!s.seqused_k.empty()) p.seqused_k = s.seqused_k.data();
    p.softmax_scale = s.softmax_scale, p.softcap = s.softcap, p.dropout_p = s.dropout_p, p.rng_state = rng_state_;
    p.window_left = s.window_left, p.window_right = s.window_right;
    if (s.alibi) p.alibi_slopes = slopes.data();
    if (s.sinks) p.sinks = sinks.data();
    if (s.bias) p.bias = {bias.data(), 0, int64_t(s.seqlen_q) * s.seqlen_k, s.seqlen_k, 1, true};
    return p;
  }

  // One query: its results, and what it adds to the gradients of its keys.
  void add_row(const FwdParams& p, int b, int h, int i, Expected& e) const {
    const SeqInfo seq = SeqInfo::of(p, b);
    const int h_kv = h / (p.num_heads / p.num_heads_kv), diagonal = i + seq.seqlen_k - seq.seqlen_q;
    const int64_t row = offset_of(p.lse, b, seq.q0, i, h), at_q = offset_of(p.q, b, seq.q0, i, h);
    const int64_t at_out = offset_of(p.out, b, seq.q0, i, h);
    const auto at_k = [&](int j) { return offset_of(p.k, b, seq.k0, j, h_kv); };
    const auto at_v = [&](int j) { return offset_of(p.v, b, seq.k0, j, h_kv); };

    std::vector<double> score(seq.seqlen_k, -INFINITY), slope_of_cap(seq.seqlen_k, 1.), kept(seq.seqlen_k, 1.);
    double highest = p.sinks ? p.sinks[h] : -INFINITY;
    for (int j = 0; j < seq.seqlen_k; j++) {
      if (p.window_left >= 0 && j < diagonal - p.window_left) continue;
      if (p.window_right >= 0 && j > diagonal + p.window_right) continue;
      double s = 0;
      for (int d = 0; d < p.head_dim; d++) s += double(cpu::to_float(q[at_q + d])) * cpu::to_float(k[at_k(j) + d]);
      s *= p.softmax_scale;
      if (p.softcap != 0.f) {
        const double t = std::tanh(s / p.softcap);
        s = p.softcap * t, slope_of_cap[j] = 1. - t * t;
      }
      if (p.alibi_slopes) s -= double(p.alibi_slopes[h]) * std::abs(diagonal - j);
      if (p.bias.ptr) s += bias[h * p.bias.head + i * p.bias.row + j];
      score[j] = s;
      highest = std::max(highest, s);
      if (p.dropout_p != 0.f) {
        const Dropout dropout = Dropout::of(p.dropout_p, p.rng_state);
        kept[j] = dropout.keep(b * p.num_heads + h, i, j) ? 1. / (1. - double(p.dropout_p)) : 0.;
      }
    }
    if (highest == -INFINITY) return;
    double sum = p.sinks ? std::exp(p.sinks[h] - highest) : 0.;
    for (double s : score) sum += std::exp(s - highest);
    e.lse[row] = highest + std::log(sum);

    std::vector<double> prob(seq.seqlen_k), dprob(seq.seqlen_k, 0.);
    double mean = shape_.dlse ? -dlse[row] : 0.;  // of dprob under prob, less dlse
    for (int j = 0; j < seq.seqlen_k; j++) {
      prob[j] = std::exp(score[j] - e.lse[row]);
      for (int d = 0; d < p.head_dim_v; d++) {
        const double value = cpu::to_float(v[at_v(j) + d]), gradient = cpu::to_float(dout[at_out + d]);
        e.out[at_out + d] += prob[j] * kept[j] * value;
        e.dv[at_v(j) + d] += prob[j] * kept[j] * gradient;
        dprob[j] += kept[j] * gradient * value;
      }
      mean += prob[j] * dprob[j];
    }
    for (int j = 0; j < seq.seqlen_k; j++) {
      const double dscore = prob[j] * (dprob[j] - mean), dqk = dscore * slope_of_cap[j] * p.softmax_scale;
      if (p.bias.ptr) e.dbias[h * p.bias.head + i * p.bias.row + j] += dscore;
      for (int d = 0; d < p.head_dim; d++) {
        e.dq[at_q + d] += dqk * cpu::to_float(k[at_k(j) + d]);
        e.dk[at_k(j) + d] += dqk * cpu::to_float(q[at_q + d]);
      }
    }
  }

  Shape shape_;
  std::mt19937 random_;
  int64_t rows_q_, rows_k_;  // in memory
  int64_t rng_state_[2] = {123456789012345, 77};
};

// The problems that both directions are tested on: every feature alone and together, lengths around tiles, packed or
// not.
inline std::vector<Shape> shapes() {
  std::vector<Shape> list;
  for (int seqlen_q : {1, 5, 64, 65, 130})
    for (int seqlen_k : {1, 17, 64, 129}) {
      list.push_back({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .head_dim = 20, .head_dim_v = 33});
      list.push_back({.batch = 2,
                      .seqlen_q = seqlen_q,
                      .seqlen_k = seqlen_k,
                      .num_heads = 4,
                      .num_heads_kv = 2,
                      .window_right = 0});
      list.push_back({.seqlen_q = seqlen_q,
                      .seqlen_k = seqlen_k,
                      .num_heads = 2,
                      .window_left = 9,
                      .window_right = 3,
                      .dlse = true});
    }
  const Shape base{
      .batch = 2, .seqlen_q = 70, .seqlen_k = 90, .num_heads = 4, .num_heads_kv = 2, .head_dim = 40, .head_dim_v = 24};
  const auto add = [&](auto change) {
    Shape shape = base;
    change(shape);
    list.push_back(shape);
  };
  add([](Shape& s) { s.softcap = 1.5f; });
  add([](Shape& s) { s.alibi = true; });
  add([](Shape& s) { s.bias = true; });
  add([](Shape& s) { s.sinks = true, s.dlse = true; });
  add([](Shape& s) { s.dropout_p = 0.3f; });
  add([](Shape& s) { s.softmax_scale = 0.f; });
  add([](Shape& s) { s.softmax_scale = -0.4f, s.window_right = 0; });
  add([](Shape& s) { s.seqused_k = {17, 0}; });
  add([](Shape& s) { s.head_dim = 300, s.head_dim_v = 1, s.softmax_scale = 0.05f; });
  add([](Shape& s) {
    s.softcap = 5.f, s.alibi = s.bias = s.sinks = s.dlse = true, s.dropout_p = 0.1f, s.window_right = 0,
    s.window_left = 50;
  });
  add([](Shape& s) { s.seqlen_q = 0; });
  add([](Shape& s) { s.seqlen_k = 0, s.sinks = true, s.dlse = true; });
  add([](Shape& s) { s.batch = 0; });
  for (int right : {-1, 0})
    add([&](Shape& s) {  // memory of 200 rows, some of which no sequence owns
      s.batch = 4, s.seqlen_q = s.seqlen_k = 200, s.window_right = right, s.sinks = s.dlse = s.alibi = true;
      s.cu_seqlens_q = {3, 3, 70, 71, 180}, s.cu_seqlens_k = {0, 20, 150, 190, 190};
    });
  add([](Shape& s) {
    s.batch = 2, s.seqlen_q = s.seqlen_k = 150, s.bias = true, s.dropout_p = 0.2f;
    s.cu_seqlens_q = {0, 66, 150}, s.cu_seqlens_k = {0, 100, 140}, s.seqused_k = {65, 40};
  });
  return list;
}

// ||got - want|| / ||want||, or ||got - want|| where ||want|| is below 1 (the gradient of a row with one key is 0).
template <class T>
double error(const std::vector<T>& got, const std::vector<double>& want) {
  double distance = 0, norm = 0;
  for (size_t i = 0; i < got.size(); i++) {
    const double x = cpu::to_float(got[i]);
    if (x == want[i]) continue;
    distance += (x - want[i]) * (x - want[i]);
    norm += want[i] * want[i];
  }
  return distance == 0 ? 0. : std::sqrt(distance / std::max(norm, 1.));
}

}  // namespace flash::test
