// cp.async.bulk: copies between global and shared memory by the copy engine, issued by one thread.
// Tensor copies take coordinates (column, row, head, batch) of a map made by tensor_map.h; elements outside the tensor
// are read as zeros (and count as copied).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash::ptx {

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Global -> shared; `bar` counts the bytes.
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2,
                                         int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Global -> L2 cache.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3)
               : "memory");
}

// Global -> shared, contiguous; addresses and `bytes` multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bar, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(dst),
               "l"(src), "r"(bar), "r"(bytes)
               : "memory");
}
// Shared -> shared memory of a block of the cluster; `dst` and `bar` are addresses there (mapa).
__device__ __forceinline__ void bulk_copy_to_cluster(uint32_t dst, uint32_t src, uint32_t bar, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(dst),
      "r"(src), "r"(bar), "r"(bytes)
      : "memory");
}

}  // namespace flash::ptx
