// fence: shared memory written by ordinary stores and then read by wgmma or the copy engine needs fence_proxy_async
// between the two: by the writers and then a barrier, or behind the barrier by who starts the reading. Memory filled by
// the copy engine needs only the wait on its mbarrier.
#pragma once

namespace flash::ptx {

__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for global memory, by the writers and by who reads it.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace flash::ptx
