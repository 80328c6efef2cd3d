// What every launch does: make the tensors' device current, allow the kernel its shared memory, look at the result.
#pragma once

#include <cuda_runtime.h>

#include "../check.h"
#include "../registry.h"

namespace flash {

// Makes `device` current and restores the caller's device at the end of the scope.
class DeviceGuard {
 public:
  // Set even where it is current already: on a thread that has not used CUDA (autograd's workers) only this binds the
  // device's context, without which driver calls such as cuTensorMapEncodeTiled fail.
  explicit DeviceGuard(int device) : device_(device) {
    FLASH_CHECK_CUDA(cudaGetDevice(&before_), "cudaGetDevice");
    FLASH_CHECK_CUDA(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  const int device_;
  int before_ = 0;
};

inline int multiprocessors(int device) {
  int count = 0;
  FLASH_CHECK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
  return count;
}

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

// A launch function calls it once per kernel and device before its first launch; it is cheap enough to call every time.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, int bytes) {
  if (bytes > 48 * 1024)
    FLASH_CHECK_CUDA(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        message("cannot use ", bytes, " bytes of shared memory"));
}

// `early`: may begin before the kernel in front of it in the stream has ended (sm_90); it waits itself for what it
// needs.
template <class... Params, class... Args>
void launch_kernel(const char* name, void (*kernel)(Params...), bool early, dim3 grid, int threads, int shared_bytes,
                   cudaStream_t stream, const Args&... args) {
  allow_shared_memory(kernel, shared_bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  FLASH_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, args...), name);
}

inline void check_launch(const char* kernel) { FLASH_CHECK_CUDA(cudaGetLastError(), kernel); }

}  // namespace flash
