// The functions of TileOps for one instruction set. No include guard: tile_ops.cpp includes this file once per set, in
// a namespace that defines
// - FLASH_TARGET: the attribute that allows the instructions; on every function, since GCC splits vectors before it
//   inlines
// - FLASH_TARGET_INLINE: the same, always inlined
// - kLanes: floats of a vector
// - kRows: rows of the register tile (kRows, kPad) of the matrix product, as many as the register file holds beside one
//   row of b and one broadcast element of a

constexpr int kVecs = kPad / kLanes;
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IVec __attribute__((vector_size(4 * kLanes)));
typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

FLASH_TARGET_INLINE Vec load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
FLASH_TARGET_INLINE void store(float* p, Vec x) { *reinterpret_cast<Unaligned*>(p) = x; }
FLASH_TARGET_INLINE Vec broadcast(float x) { return x - Vec{}; }

// exp(x) within 1 ulp for x <= 88; 0 below -87.3, where the result would be subnormal. NaN stays NaN.
FLASH_TARGET_INLINE Vec exp(Vec x) {
  const Vec lowest = broadcast(-87.3365f), highest = broadcast(88.f);
  const Vec clamped = x < lowest ? lowest : x > highest ? highest : x;
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
  return x < lowest ? Vec{} : (Vec)scaled;
}

// A register tile c (kTileRows, kPad): k outer products of a column of a and a row of b.
template <int kTileRows>
FLASH_TARGET_INLINE void outer_products(Tile c, View a, Tile b, int k, const Finish& finish) {
  Vec acc[kTileRows][kVecs] = {};
  for (int i = 0; i < k; i++) {
    Vec row_b[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v++) row_b[v] = load(b.data + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; r++) {
      const Vec element_a = broadcast(a.data[r * a.row]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; v++) acc[r][v] += element_a * row_b[v];
    }
    a.data += a.col;
    b.data += b.row;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v++) {
      float* const out = c.data + r * c.row + v * kLanes;
      const Vec scaled = acc[r][v] * finish.alpha;
      store(out, finish.accumulate ? load(out) + scaled : scaled);
    }
  }
}

// The last rows, fewer than kRows.
template <int kTileRows>
FLASH_TARGET_INLINE void last_rows(int rows, Tile c, View a, Tile b, int k, const Finish& finish) {
  if constexpr (kTileRows > 0) {
    if (rows == kTileRows) {
      outer_products<kTileRows>(c, a, b, k, finish);
    } else {
      last_rows<kTileRows - 1>(rows, c, a, b, k, finish);
    }
  }
}

FLASH_TARGET void matmul(Tile c, View a, Tile b, Shape shape, const Finish& finish) {
  for (int col = 0; col < shape.n; col += kPad) {
    int row = 0;
    for (; row + kRows <= shape.m; row += kRows)
      outer_products<kRows>(c.from(row, col), a.from_row(row), b.from(0, col), shape.k, finish);
    last_rows<kRows - 1>(shape.m - row, c.from(row, col), a.from_row(row), b.from(0, col), shape.k, finish);
  }
}

FLASH_TARGET void online_softmax(float* scores, int keys, int queries, float* row_max, float* row_sum, float* rescale) {
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
    Vec sum = {};  // of this tile alone: small sums of few terms round less than one long sum
    for (int j = 0; j < keys; j++) {
      const Vec p = exp(load(scores + j * kBlockM + i) - shift);
      store(scores + j * kBlockM + i, p);
      sum += p;
    }
    store(row_max + i, new_max);
    store(row_sum + i, load(row_sum + i) * factor + sum);
    store(rescale + i, factor);
  }
}

FLASH_TARGET void scale_rows(float* tile, int rows, int dim, const float* factor) {
  for (int r = 0; r < rows; r++)
    for (int d = 0; d < dim; d += kLanes) store(tile + r * dim + d, load(tile + r * dim + d) * factor[r]);
}

FLASH_TARGET void exp_minus_lse(float* scores, int queries, int keys, const float* lse) {
  for (int i = 0; i < queries; i++)
    for (int j = 0; j < keys; j += kLanes)
      store(scores + i * kBlockN + j, exp(load(scores + i * kBlockN + j) - lse[i]));
}

FLASH_TARGET void softmax_backward(float* dprobs, const float* probs, int queries, int keys, const float* delta) {
  for (int i = 0; i < queries; i++)
    for (int j = 0; j < keys; j += kLanes) {
      float* const out = dprobs + i * kBlockN + j;
      store(out, load(probs + i * kBlockN + j) * (load(out) - delta[i]));
    }
}

// Scalar code that the compiler vectorises.
template <class T>
FLASH_TARGET void to_floats(float* __restrict floats, const T* __restrict elements, int count) {
  for (int i = 0; i < count; i++) floats[i] = to_float(elements[i]);
}

constexpr TileOps kOps = {&to_floats,  &to_floats,     &matmul,          &online_softmax,
                          &scale_rows, &exp_minus_lse, &softmax_backward};
