// mbarrier: counts arrivals and bytes of asynchronous copies in shared memory. Barriers are addressed by their 32-bit
// shared-memory address. A wait passes when the phase of the given parity has completed: on a fresh barrier, parity 1
// passes at once and parity 0 waits for the first phase.
#pragma once

#include <cstdint>

#include "cluster.cuh"

namespace flash::ptx {

__device__ __forceinline__ uint32_t smem_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void mbarrier_init(uint32_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster; then synchronise
// threads.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Whether this arrival was the last one that the current phase waited for.
__device__ __forceinline__ bool mbarrier_arrive_is_last(uint32_t bar) {
  uint32_t pending;
  asm volatile(
      "{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%1];\nmbarrier.pending_count.b64 %0, state;\n}"
      : "=r"(pending)
      : "r"(bar)
      : "memory");
  return pending == 1;
}
// One arrival; the phase completes only after `bytes` more bytes have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// An arrival on the barrier at the same address in block `rank` of the cluster, with all that this thread has written:
// it waits until its additions to global memory have been performed, too.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t bar, uint32_t rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapa(bar, rank)) : "memory");
}
// The same for who has only read what the other block will overwrite, and has written nothing for it: what multicast
// pipelines do to release a buffer. That the reads are done is up to the caller (wgmma_wait_group, or registers that
// hold what was loaded): this orders nothing between blocks. Release, not relaxed: a relaxed arrival the compiler may
// move behind the additions that follow it.
__device__ __forceinline__ void mbarrier_arrive_remote_read(uint32_t bar, uint32_t rank) {
  asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(mapa(bar, rank)) : "memory");
}

// Before sm_90 a thread can only ask.
__device__ __forceinline__ void mbarrier_test_until(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.test_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra "
      "WAIT;\nDONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
// try_wait suspends the thread for a while by itself: no sleep in the loop.
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
#if __CUDA_ARCH__ < 900
  mbarrier_test_until(bar, parity);
#else
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra "
      "WAIT;\nDONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
#endif
}
// The same for what other blocks of the cluster have written by ordinary stores before they arrived. It empties this
// multiprocessor's L1 cache; who waits for a bulk copy, or until a buffer has been read, needs none of that.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
      "bra WAIT;\nDONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

}  // namespace flash::ptx
