// fence: shared memory written by ordinary stores and then read by wgmma or the copy engine needs fence_proxy_async by
// the writers, then a barrier. Memory filled by the copy engine needs only the wait on its mbarrier.
#pragma once

namespace flash::ptx {

__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace flash::ptx
