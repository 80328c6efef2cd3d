// The shared memory of a device.
#pragma once

#include <cuda_runtime.h>

#include "../check.h"
#include "tile.h"

namespace flash::sm80 {

inline SharedMemory shared_memory_of(int device) {
  SharedMemory memory{};
  FLASH_CHECK_CUDA(cudaDeviceGetAttribute(&memory.per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                   "cudaDeviceGetAttribute");
  FLASH_CHECK_CUDA(cudaDeviceGetAttribute(&memory.per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
                   "cudaDeviceGetAttribute");
  return memory;
}

}  // namespace flash::sm80
