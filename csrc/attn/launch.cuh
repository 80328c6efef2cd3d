// What every launch does: make the tensors' device current, allow the kernel its shared memory, look at the result.
#pragma once

#include <cuda_runtime.h>

#include "../check.h"
#include "../registry.h"

namespace flash {

// Makes `device` current and restores the caller's device at the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    FLASH_CHECK_CUDA(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) {
      FLASH_CHECK_CUDA(cudaSetDevice(device), "cudaSetDevice");
      changed_ = true;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

// A launch function calls it once per kernel and device before its first launch; it is cheap enough to call every time.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, int bytes) {
  if (bytes > 48 * 1024)
    FLASH_CHECK_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                     message("cannot use ", bytes, " bytes of shared memory"));
}

inline void check_launch(const char* kernel) { FLASH_CHECK_CUDA(cudaGetLastError(), kernel); }

}  // namespace flash
