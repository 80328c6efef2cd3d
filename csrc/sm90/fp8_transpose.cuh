// V -> V^T in tiles (fp8_layout.h), in front of the FP8 forward. One thread block per tile; zeros where a sequence has
// no more keys, so that nothing behind its end, NaN or not, reaches a product.
#pragma once

#include "../ptx/griddep.cuh"
#include "fp8_traits.cuh"

namespace flash::sm90 {

// The keys of one tile.
struct ValueTile {
  int batch;    // -1: nobody's
  int64_t row;  // of its first key in v
  int keys;     // that exist, may be negative
};

__device__ __forceinline__ ValueTile find_value_tile(const FwdParams& p, const ValueTiles& tiles, int index) {
  int b = 0;
  if (tiles.per_sequence > 0) {
    b = index / tiles.per_sequence;
  } else {  // the last segment that begins at or before the tile
    for (int above = p.batch; above - b > 1;) {
      const int middle = (b + above) / 2;
      (tiles.first(middle, SeqInfo::of(p, middle).k0) <= index ? b : above) = middle;
    }
  }
  const SeqInfo s = SeqInfo::of(p, b);
  const int n_block = index - tiles.first(b, s.k0);
  if (n_block < 0 || n_block >= max_of(1, ceil_div(s.seqlen_k, tiles.block_n))) return {-1, 0, 0};
  return {b, s.k0 + int64_t(n_block) * tiles.block_n, s.seqlen_k - n_block * tiles.block_n};
}

// Four words of four bytes, as a matrix: rows become columns.
__device__ __forceinline__ void transpose_bytes(uint32_t (&x)[4]) {
  const uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
  const uint32_t c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(a, b, 0x5410);
  x[1] = __byte_perm(a, b, 0x7632);
  x[2] = __byte_perm(c, d, 0x5410);
  x[3] = __byte_perm(c, d, 0x7632);
}

// Every thread takes 16 keys of four columns: a warp 64 keys of 32 columns, so that whole sectors of 32 bytes are read
// and 64 bytes of a row written at once.
template <int kHeadDimV>
inline constexpr int kTransposeThreads = kHeadDimV / 32 * (kValueRowBytes / 64) * 32;

// grid (tiles of a head, num_heads_kv)
template <int kHeadDimV>
__global__ void __launch_bounds__(kTransposeThreads<kHeadDimV>)
    fp8_transpose_kernel(const __grid_constant__ FwdParams p, ValueTiles tiles, uint8_t* values) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const ValueTile tile = find_value_tile(p, tiles, blockIdx.x);
  if (tile.batch < 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunk = warp % 2 * 4 + lane / 8, column = warp / 2 * 32 + lane % 8 * 4;
  const uint8_t* v = static_cast<const uint8_t*>(p.v.ptr) + tile.batch * p.v.batch + tile.row * p.v.row +
                     blockIdx.y * p.v.head + column;  // (keys, 4)
  const int keys = column < p.head_dim_v ? min_of(tile.keys, tiles.block_n) : 0;

  uint32_t word[4][4];  // (place / 4, four places), then (place / 4, column)
#pragma unroll
  for (int place = 0; place < 16; place++) {
    const int key = 16 * chunk + value_key(place);
    word[place / 4][place % 4] = key < keys ? __ldg(reinterpret_cast<const uint32_t*>(v + key * p.v.row)) : 0;
  }
#pragma unroll
  for (int j = 0; j < 4; j++) transpose_bytes(word[j]);
  uint8_t* out = values + (blockIdx.y * tiles.per_head + blockIdx.x) * (kHeadDimV * kValueRowBytes);
#pragma unroll
  for (int j = 0; j < 4; j++)
    *reinterpret_cast<uint4*>(out + value_chunk_offset(column + j, chunk)) =
        make_uint4(word[0][j], word[1][j], word[2][j], word[3][j]);
}

}  // namespace flash::sm90
