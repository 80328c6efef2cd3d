// What every launch does: make the tensors' device current, allow the kernel its shared memory, look at the result.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <map>
#include <utility>

#include "../check.h"
#include "../registry.h"

namespace flash {

// Makes `device` current and restores the caller's device at the end of the scope.
class DeviceGuard {
 public:
  // Set once even where it is current already: on a thread that has not used CUDA (autograd's workers) only this binds
  // the device's context, without which driver calls such as cuTensorMapEncodeTiled fail.
  explicit DeviceGuard(int device) : device_(device) {
    static thread_local int bound = -1;
    FLASH_CHECK_CUDA(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == device && bound == device) return;
    FLASH_CHECK_CUDA(cudaSetDevice(device), "cudaSetDevice");
    bound = device;
  }
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  const int device_;
  int before_ = 0;
};

// A positive number per device that the driver is asked for once.
class KnownPerDevice {
 public:
  template <class Ask>
  int get(int device, const Ask& ask) {
    if (device < 0 || device >= kDevices) return ask();
    if (const int known = known_[device].load(std::memory_order_relaxed)) return known;
    const int answer = ask();
    known_[device].store(answer, std::memory_order_relaxed);
    return answer;
  }

 private:
  static constexpr int kDevices = 64;
  std::atomic<int> known_[kDevices] = {};  // 0: not asked yet
};

inline int multiprocessors(int device) {
  static KnownPerDevice known;
  return known.get(device, [&] {
    int count = 0;
    FLASH_CHECK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
    return count;
  });
}

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

// Before a launch on the current device. The driver is told once per thread; later calls cost a lookup.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, int bytes) {
  if (bytes <= 48 * 1024) return;
  static thread_local std::map<std::pair<const void*, int>, int> allowed;  // (kernel, device) -> bytes
  const void* const function = reinterpret_cast<const void*>(kernel);
  int device = 0;
  FLASH_CHECK_CUDA(cudaGetDevice(&device), "cudaGetDevice");
  int& known = allowed[{function, device}];
  if (known == bytes) return;
  FLASH_CHECK_CUDA(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                   message("cannot use ", bytes, " bytes of shared memory"));
  known = bytes;
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
