// delta = rowsum(dout * out) - dlse, one warp per query row and head; and zeros where gradients are added or have no
// row.
#pragma once

#include "kernel.cuh"

namespace flash::simt {

inline constexpr int kRowThreads = 256;

// Row `row` of `rows` in memory, head and sequence of this warp; packed tensors count as one sequence.
struct WarpRow {
  int64_t row;
  int head, batch_index;
  bool exists;

  __device__ static WarpRow of(int64_t rows, int heads, int batch) {
    const int64_t index = int64_t(blockIdx.x) * (kRowThreads / 32) + threadIdx.x / 32;
    const int64_t rest = index / heads;
    return {rest % rows, int(index % heads), int(rest / rows), rest / rows < batch};
  }
};

inline unsigned row_grid(int64_t rows, int heads, int batch) {
  constexpr int kRowsPerCta = kRowThreads / 32;
  return unsigned((rows * heads * batch + kRowsPerCta - 1) / kRowsPerCta);
}

static __global__ void __launch_bounds__(kRowThreads)
    bwd_delta_kernel(const __grid_constant__ BwdParams p, int64_t rows, int batch) {
  const WarpRow at = WarpRow::of(rows, p.num_heads, batch);
  if (!at.exists) return;
  const Rows out = Rows::of(p.out, p, at.batch_index, at.row, 1, at.head, p.head_dim_v);
  const Rows dout = Rows::of(p.dout, p, at.batch_index, at.row, 1, at.head, p.head_dim_v);
  float sum = 0.f;
  for (int col = threadIdx.x % 32 * 4; col < p.head_dim_v; col += 128) {
    const float4 a = load_4(out, 0, col), b = load_4(dout, 0, col);
    sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
  }
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, bit);
  if (threadIdx.x % 32 != 0) return;
  if (p.dlse.ptr) sum -= p.dlse.ptr[offset_of(p.dlse, at.batch_index, at.row, 0, at.head)];
  p.delta.ptr[offset_of(p.delta, at.batch_index, at.row, 0, at.head)] = sum;
}

static __global__ void __launch_bounds__(kRowThreads)
    clear_rows_kernel(const __grid_constant__ BwdParams p, Strided t, int64_t rows, int heads, int batch, int cols) {
  const WarpRow at = WarpRow::of(rows, heads, batch);
  if (!at.exists) return;
  const Rows dst = Rows::of(t, p, at.batch_index, at.row, 1, at.head, cols);
  const float zeros[4] = {};
  for (int col = threadIdx.x % 32 * 4; col < cols; col += 128) store(dst, 0, col, zeros);
}

inline void launch_delta(const BwdParams& p, Stream stream) {
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t rows = packed ? p.total_q : p.seqlen_q;
  const int batch = packed ? 1 : p.batch;
  if (rows * batch * p.num_heads == 0) return;
  bwd_delta_kernel<<<row_grid(rows, p.num_heads, batch), kRowThreads, 0, cuda_stream(stream)>>>(p, rows, batch);
  check_launch("bwd_delta");
}

inline void launch_clear(const BwdParams& p, const Strided& t, int64_t rows, int heads, int batch, int cols,
                         Stream stream) {
  if (rows * heads * batch == 0) return;
  clear_rows_kernel<<<row_grid(rows, heads, batch), kRowThreads, 0, cuda_stream(stream)>>>(p, t, rows, heads, batch,
                                                                                           cols);
  check_launch("clear_rows");
}

// Rows that belong to no segment have gradients too: zeros.
inline void launch_clear_packed(const BwdParams& p, Stream stream) {
  if (p.cu_seqlens_q) launch_clear(p, p.dq, p.total_q, p.num_heads, 1, p.head_dim, stream);
  if (p.cu_seqlens_k) {
    launch_clear(p, p.dk, p.total_k, p.num_heads_kv, 1, p.head_dim, stream);
    launch_clear(p, p.dv, p.total_k, p.num_heads_kv, 1, p.head_dim_v, stream);
  }
}

}  // namespace flash::simt
