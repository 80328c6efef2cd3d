// Counters from which the blocks of a launch claim their tiles. They lie in the module's own zero-initialised memory,
// so nothing is allocated, and the last block of a launch resets them for the next.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

#include "../attn/launch.cuh"

namespace flash::sm90 {

inline constexpr int kCounterSlots = 4096;

struct Counter {
  int claimed, finished;
};

// One copy per translation unit, and the slots are handed out for all of them together.
static __device__ Counter tile_counters[kCounterSlots];

// Two launches that may run at the same time never share a slot: a stream keeps its slot, and every captured launch
// gets one of its own, since graphs may run beside the stream they were captured on. -1 when all are taken: the kernel
// then deals its tiles out statically.
inline int counter_slot(int device, cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, unsigned long long>, int> slot_of;
  static std::map<int, int> used;

  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  FLASH_CHECK_CUDA(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing");
  const std::lock_guard<std::mutex> lock(mutex);
  int& next = used[device];
  if (capturing != cudaStreamCaptureStatusNone) return next < kCounterSlots ? next++ : -1;
  unsigned long long id = 0;
  FLASH_CHECK_CUDA(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  const auto [entry, is_new] = slot_of.try_emplace({device, id}, -1);
  if (is_new && next < kCounterSlots) entry->second = next++;
  return entry->second;
}

}  // namespace flash::sm90
