// What every launch does: make the tensors' device current, allow the kernel its shared memory, look at the result.
// launch.cu holds what is no template, so that kernel files are spared its headers.
#pragma once

#include <cuda_runtime.h>

#include "../check.h"
#include "../registry.h"

namespace flash {

// Kernel files are by head dim: the one ending in _d192 holds the rows up to 192 that no file before it holds.
constexpr int head_dim_of_file(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : head_dim <= 128 ? 128 : head_dim <= 192 ? 192 : 256;
}

// Makes `device` current and restores the caller's device at the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  const int device_;
  int before_ = 0;
};

// A positive number per device that the driver is asked for once: a thread_local variable.
class KnownPerDevice {
 public:
  template <class Ask>
  int get(int device, const Ask& ask) {
    if (device < 0 || device >= kDevices) return ask();
    if (known_[device] == 0) known_[device] = ask();
    return known_[device];
  }

 private:
  static constexpr int kDevices = 64;
  int known_[kDevices] = {};  // 0: not asked yet
};

int multiprocessors(int device);

// Numbers below `count` for what two launches must not share if they may run at the same time: a stream keeps its
// number, and every captured launch gets one of its own, since graphs may run beside the stream they were captured on.
// -1 when all are taken.
int number_of_stream(int device, cudaStream_t stream, int count);

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

// Before a launch on the current device. The driver is told once per thread; later calls cost a lookup.
void allow_shared_memory(const void* kernel, int bytes);
template <class Kernel>
void allow_shared_memory(Kernel* kernel, int bytes) {
  if (bytes > 48 * 1024) allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
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
