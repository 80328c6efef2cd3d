// Thread block clusters.
#pragma once

#include <cstdint>

// Of a kernel that runs in clusters of this shape. Architectures before sm_90, for which an extension's files are
// compiled too, refuse the attribute.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define FLASH_CLUSTER(...)
#else
#define FLASH_CLUSTER(...) __cluster_dims__(__VA_ARGS__)
#endif

namespace flash::ptx {

__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Address in block `rank` of the cluster of what lies at `address` here.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Writes to the shared memory of a block of the cluster, at an address from mapa.
__device__ __forceinline__ void store_to_cluster(uint32_t remote, int x) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(remote), "r"(x) : "memory");
}

}  // namespace flash::ptx
