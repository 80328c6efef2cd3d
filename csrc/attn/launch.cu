#include "launch.cuh"

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "shared_memory.h"

namespace flash {

// Set once even where it is current already: on a thread that has not used CUDA (autograd's workers) only this binds
// the device's context, without which driver calls such as cuTensorMapEncodeTiled fail.
DeviceGuard::DeviceGuard(int device) : device_(device) {
  static thread_local int bound = -1;
  FLASH_CHECK_CUDA(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ == device && bound == device) return;
  FLASH_CHECK_CUDA(cudaSetDevice(device), "cudaSetDevice");
  bound = device;
}

namespace {

// An attribute of a device, which never changes: the driver is asked once per thread.
template <cudaDeviceAttr kAttribute>
int attribute_of(int device, const char* name) {
  static thread_local KnownPerDevice known;
  return known.get(device, [&] {
    int value = 0;
    FLASH_CHECK_CUDA(cudaDeviceGetAttribute(&value, kAttribute, device), name);
    return value;
  });
}

}  // namespace

int multiprocessors(int device) {
  return attribute_of<cudaDevAttrMultiProcessorCount>(device, "cudaDevAttrMultiProcessorCount");
}

SharedMemory shared_memory_of(int device) {
  const SharedMemory memory{
      attribute_of<cudaDevAttrMaxSharedMemoryPerBlockOptin>(device, "cudaDevAttrMaxSharedMemoryPerBlockOptin"),
      attribute_of<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(device, "cudaDevAttrMaxSharedMemoryPerMultiprocessor")};
  static const char* const kib = std::getenv("FLASH_EXT_SHARED_MEMORY");
  if (kib == nullptr) return memory;
  FLASH_CHECK_ARG(std::atoi(kib) > 0, "FLASH_EXT_SHARED_MEMORY must be a number of KiB, got ", kib);
  return with_smaller_blocks(memory, 1024 * std::atoi(kib));
}

void allow_shared_memory(const void* kernel, int bytes) {
  static thread_local std::map<std::pair<const void*, int>, int> allowed;  // (kernel, device) -> bytes
  int device = 0;
  FLASH_CHECK_CUDA(cudaGetDevice(&device), "cudaGetDevice");
  int& known = allowed[{kernel, device}];
  if (known == bytes) return;
  FLASH_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                   message("cannot use ", bytes, " bytes of shared memory"));
  known = bytes;
}

int number_of_stream(int device, cudaStream_t stream, int count) {
  static std::mutex mutex;
  static std::map<std::pair<int, unsigned long long>, int> number_of;  // (device, stream)
  static std::map<int, int> used;

  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  FLASH_CHECK_CUDA(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing");
  const std::lock_guard<std::mutex> lock(mutex);
  int& next = used[device];
  if (capturing != cudaStreamCaptureStatusNone) return next < count ? next++ : -1;
  unsigned long long id = 0;
  FLASH_CHECK_CUDA(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  const auto [entry, is_new] = number_of.try_emplace({device, id}, -1);
  if (is_new && next < count) entry->second = next++;
  return entry->second;
}

}  // namespace flash
