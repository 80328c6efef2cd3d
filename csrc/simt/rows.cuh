// Rows of one sequence and head in global memory, in any dtype and with any stride: fp32 in shared memory and
// registers. The dtype is a run-time matter: only loads and stores know it, everything between is fp32.
#pragma once

#include <type_traits>

#include "../attn/numeric.cuh"
#include "../attn/seqlen.h"
#include "../ptx/cp_async.cuh"

namespace flash::simt {

// (rows, cols), cols contiguous.
struct Rows {
  char* ptr;       // row 0
  int64_t stride;  // elements from row to row
  int rows, cols;
  DType dtype;
  bool by_four;  // four elements at a time are aligned, and cols is a multiple of four

  __device__ static Rows of(const Strided& t, const AttnParams& p, int batch_index, int64_t first_row, int rows,
                            int head, int cols) {
    const int bytes = p.dtype == DType::kF32 ? 4 : 2;
    char* ptr = static_cast<char*>(t.ptr) + offset_of(t, batch_index, first_row, 0, head) * bytes;
    const bool by_four = reinterpret_cast<uintptr_t>(ptr) % (4 * bytes) == 0 && t.row % 4 == 0 && cols % 4 == 0;
    return {ptr, t.row, rows, cols, p.dtype, by_four};
  }
};

// 16 bytes from global to shared memory; zeros where `valid` is false. Asynchronous from sm_80 on.
__device__ __forceinline__ void copy_16(float* shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  ptx::cp_async_16(uint32_t(__cvta_generic_to_shared(shared)), global, valid ? 16 : 0);
#else
  *reinterpret_cast<float4*>(shared) = valid ? *static_cast<const float4*>(global) : float4{0.f, 0.f, 0.f, 0.f};
#endif
}

// The same for 4 bytes.
__device__ __forceinline__ void copy_4(float* shared, const float* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  ptx::cp_async_4(uint32_t(__cvta_generic_to_shared(shared)), global, valid);
#else
  *shared = valid ? *global : 0.f;
#endif
}

// All copies that this thread has begun have landed; __syncthreads makes them visible to the others.
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  ptx::cp_async_wait_all();
#endif
}

template <class T>
__device__ __forceinline__ float4 load_4(const T* ptr, bool by_four, int count) {  // count: elements that exist
  float x[4] = {0.f, 0.f, 0.f, 0.f};
  if (by_four) {
    alignas(4 * sizeof(T)) T raw[4];
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float4*>(raw) = *reinterpret_cast<const float4*>(ptr);
    } else {
      *reinterpret_cast<uint2*>(raw) = *reinterpret_cast<const uint2*>(ptr);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = to_float(raw[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (i < count) x[i] = to_float(ptr[i]);
  }
  return {x[0], x[1], x[2], x[3]};
}

template <class T, int kCount>  // kCount: 2 or 4
__device__ __forceinline__ void store(T* ptr, const float (&x)[kCount], bool by_four, int count) {
  if (by_four) {
    alignas(kCount * sizeof(T)) T raw[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++) raw[i] = from_float<T>(x[i]);
    using Word = std::conditional_t<sizeof(raw) == 16, uint4, std::conditional_t<sizeof(raw) == 8, uint2, uint32_t>>;
    *reinterpret_cast<Word*>(ptr) = *reinterpret_cast<const Word*>(raw);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i++)
      if (i < count) ptr[i] = from_float<T>(x[i]);
  }
}

// Four elements of row `row` from column `col` on; zeros past the last column.
template <class T>
__device__ __forceinline__ float4 load_4(const Rows& src, int row, int col) {
  return load_4(reinterpret_cast<const T*>(src.ptr) + row * src.stride + col, src.by_four, src.cols - col);
}

__device__ inline float4 load_4(const Rows& src, int row, int col) {
  if (src.dtype == DType::kF32) return load_4<float>(src, row, col);
  if (src.dtype == DType::kF16) return load_4<__half>(src, row, col);
  return load_4<__nv_bfloat16>(src, row, col);
}

// Two or four numbers to row `row` from column `col` on.
template <int kCount>
__device__ __forceinline__ void store(const Rows& dst, int row, int col, const float (&x)[kCount]) {
  const int64_t offset = row * dst.stride + col;
  const int count = dst.cols - col;
  if (dst.dtype == DType::kF32) {
    store(reinterpret_cast<float*>(dst.ptr) + offset, x, dst.by_four, count);
  } else if (dst.dtype == DType::kF16) {
    store(reinterpret_cast<__half*>(dst.ptr) + offset, x, dst.by_four, count);
  } else {
    store(reinterpret_cast<__nv_bfloat16*>(dst.ptr) + offset, x, dst.by_four, count);
  }
}

// Rows row0 ... row0 + kRows - 1 into a tile (kRows, kHeadDim) of shared memory; what lies beyond the sequence or
// beyond head_dim becomes 0, so that NaN there cannot come back as 0 * NaN. Complete after wait_for_copies and
// __syncthreads.
template <int kRows, int kHeadDim, int kThreads>
__device__ __forceinline__ void load_tile(float* tile, const Rows& src, int row0) {
  constexpr int kVectors = kHeadDim / 4, kRowsAtOnce = kThreads / kVectors;
  static_assert(kThreads % kVectors == 0);
  const int first = int(threadIdx.x) / kVectors, col = int(threadIdx.x) % kVectors * 4;
  float* to = tile + first * (kHeadDim + 4) + col;
  if (src.dtype == DType::kF32 && src.by_four) {
    const float* from = reinterpret_cast<const float*>(src.ptr) + (row0 + first) * src.stride + col;
    const int rows = col < src.cols ? src.rows - row0 : 0;  // of this column
#pragma unroll
    for (int row = 0; row < kRows; row += kRowsAtOnce) {
      if (kRows % kRowsAtOnce != 0 && row + first >= kRows) break;
      const bool valid = row + first < rows;
      copy_16(to + row * (kHeadDim + 4), valid ? from : reinterpret_cast<const float*>(src.ptr), valid);
      from += kRowsAtOnce * src.stride;
    }
  } else {
#pragma unroll 1
    for (int row = first; row < kRows; row += kRowsAtOnce, to += kRowsAtOnce * (kHeadDim + 4)) {
      float4 x{0.f, 0.f, 0.f, 0.f};
      if (row0 + row < src.rows && col < src.cols) x = load_4(src, row0 + row, col);
      *reinterpret_cast<float4*>(to) = x;
    }
  }
}

}  // namespace flash::simt
