#include "tile_ops.h"

#include <cmath>
#include <limits>

// Vectors are passed only between functions that are inlined: the ABI that this warning is about is never used.
#pragma GCC diagnostic ignored "-Wpsabi"

#define FLASH_INLINE __attribute__((always_inline)) inline

namespace flash::cpu {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// kLanes floats side by side. kRows: rows of the register tile (kRows, kPad) of the matrix product; it is as large as
// the register file allows, with room for one row of b and one broadcast element of a.
template <int kLanes_, int kRows_>
struct Simd {
  static constexpr int kLanes = kLanes_, kRows = kRows_, kVecs = kPad / kLanes;
  typedef float Vec __attribute__((vector_size(4 * kLanes)));
  typedef int32_t IVec __attribute__((vector_size(4 * kLanes)));
  typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

  FLASH_INLINE static Vec load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
  FLASH_INLINE static void store(float* p, const Vec& x) { *reinterpret_cast<Unaligned*>(p) = x; }
  FLASH_INLINE static Vec broadcast(float x) { return x - Vec{}; }

  // exp(x) within 1 ulp for x <= 88; 0 below -87.3, where the result would be subnormal. NaN stays NaN.
  FLASH_INLINE static Vec exp(const Vec& x) {
    constexpr float kLowest = -87.3365f, kHighest = 88.f;
    const Vec clamped = x < kLowest ? broadcast(kLowest) : x > kHighest ? broadcast(kHighest) : x;
    // x = n ln 2 + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 leaves n in the low bits of the sum.
    const Vec shifted = clamped * 1.44269504f + 0x1.8p23f;
    const Vec n = shifted - 0x1.8p23f;
    const Vec r = (clamped - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts: n times the first is exact
    // e^r = 1 + r + r^2 q(r); q minimises the largest relative error, 0.05 units in the last place.
    Vec q = r * 0x1.6a2352p-10f + 0x1.123a6cp-7f;
    q = q * r + 0x1.5558f4p-5f;
    q = q * r + 0x1.555490p-3f;
    q = q * r + 0x1.fffffcp-2f;
    const Vec e = r * r * q + r + 1.f;
    const IVec scaled = (IVec)e + ((IVec)shifted << 23);  // times 2^n
    return x < kLowest ? Vec{} : (Vec)scaled;
  }

  // A register tile c (kTileRows, kPad): k outer products of a column of a and a row of b.
  template <int kTileRows>
  FLASH_INLINE static void outer_products(float* c, int64_t ldc, View a, const float* b, int64_t ldb, int k,
                                          float alpha, bool accumulate) {
    Vec acc[kTileRows][kVecs] = {};
    for (int i = 0; i < k; i++) {
      Vec row_b[kVecs];
      for (int v = 0; v < kVecs; v++) row_b[v] = load(b + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; r++) {
        const Vec element_a = broadcast(a.data[r * a.row]);
        for (int v = 0; v < kVecs; v++) acc[r][v] += element_a * row_b[v];
      }
      a.data += a.col;
      b += ldb;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; r++)
      for (int v = 0; v < kVecs; v++) {
        float* const out = c + r * ldc + v * kLanes;
        store(out, accumulate ? load(out) + alpha * acc[r][v] : alpha * acc[r][v]);
      }
  }

  // The last rows, fewer than kRows.
  template <int kTileRows>
  FLASH_INLINE static void last_rows(int rows, float* c, int64_t ldc, View a, const float* b, int64_t ldb, int k,
                                     float alpha, bool accumulate) {
    if constexpr (kTileRows > 0) {
      if (rows == kTileRows) {
        outer_products<kTileRows>(c, ldc, a, b, ldb, k, alpha, accumulate);
      } else {
        last_rows<kTileRows - 1>(rows, c, ldc, a, b, ldb, k, alpha, accumulate);
      }
    }
  }

  FLASH_INLINE static void matmul(float* c, int64_t ldc, View a, const float* b, int64_t ldb, int m, int n, int k,
                                  float alpha, bool accumulate) {
    for (int col = 0; col < n; col += kPad) {
      int row = 0;
      for (; row + kRows <= m; row += kRows)
        outer_products<kRows>(c + row * ldc + col, ldc, {a.data + row * a.row, a.row, a.col}, b + col, ldb, k, alpha,
                              accumulate);
      last_rows<kRows - 1>(m - row, c + row * ldc + col, ldc, {a.data + row * a.row, a.row, a.col}, b + col, ldb, k,
                           alpha, accumulate);
    }
  }

  FLASH_INLINE static void online_softmax(float* scores, int keys, int queries, float* row_max, float* row_sum,
                                          float* rescale) {
    for (int i = 0; i < queries; i += kLanes) {
      const Vec old_max = load(row_max + i);
      Vec new_max = old_max;
      for (int j = 0; j < keys; j++) {
        const Vec s = load(scores + j * kBlockM + i);
        new_max = s > new_max ? s : new_max;
      }
      // A row that has seen no key yet: -inf - -inf would be NaN, exp(-inf - 0) is 0.
      const Vec shift = new_max == -kInf ? Vec{} : new_max;
      const Vec factor = exp(old_max - shift);
      Vec sum = load(row_sum + i) * factor;
      for (int j = 0; j < keys; j++) {
        const Vec p = exp(load(scores + j * kBlockM + i) - shift);
        store(scores + j * kBlockM + i, p);
        sum += p;
      }
      store(row_max + i, new_max);
      store(row_sum + i, sum);
      store(rescale + i, factor);
    }
  }

  FLASH_INLINE static void exp_minus_lse(float* scores, int queries, int keys, const float* lse) {
    for (int i = 0; i < queries; i++)
      for (int j = 0; j < keys; j += kLanes)
        store(scores + i * kBlockN + j, exp(load(scores + i * kBlockN + j) - lse[i]));
  }

  FLASH_INLINE static void softmax_backward(float* dprobs, const float* probs, int queries, int keys,
                                            const float* delta) {
    for (int i = 0; i < queries; i++)
      for (int j = 0; j < keys; j += kLanes) {
        float* const out = dprobs + i * kBlockN + j;
        store(out, load(probs + i * kBlockN + j) * (load(out) - delta[i]));
      }
  }
};

// Entry points per instruction set; the functions above are inlined into them and compiled with their instructions.
#if defined(__x86_64__)
template <auto kFunction, class... Args>
__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,fma"))) void on_avx512(Args... args) {
  kFunction(args...);
}
template <auto kFunction, class... Args>
__attribute__((target("avx2,fma"))) void on_avx2(Args... args) {
  kFunction(args...);
}
using Avx512 = Simd<16, 12>;
using Avx2 = Simd<8, 6>;
using Baseline = Simd<4, 2>;
#else
using Baseline = Simd<4, 6>;
#endif

const TileOps& choose() {
#if defined(__x86_64__)
  static constexpr TileOps kAvx512 = {&on_avx512<&Avx512::matmul>, &on_avx512<&Avx512::online_softmax>,
                                      &on_avx512<&Avx512::exp_minus_lse>, &on_avx512<&Avx512::softmax_backward>};
  static constexpr TileOps kAvx2 = {&on_avx2<&Avx2::matmul>, &on_avx2<&Avx2::online_softmax>,
                                    &on_avx2<&Avx2::exp_minus_lse>, &on_avx2<&Avx2::softmax_backward>};
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq"))
    return kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
  static constexpr TileOps kBaseline = {&Baseline::matmul, &Baseline::online_softmax, &Baseline::exp_minus_lse,
                                        &Baseline::softmax_backward};
  return kBaseline;
}

}  // namespace

const TileOps& tile_ops() {
  static const TileOps& ops = choose();
  return ops;
}

}  // namespace flash::cpu
