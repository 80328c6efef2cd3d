// The two host checks. Python turns std::invalid_argument into ValueError and std::runtime_error into RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>

// FLASH_CHECK_ARG(head_dim <= 256, "head_dim must be at most 256, got ", head_dim)
#define FLASH_CHECK_ARG(condition, ...)                                           \
  do {                                                                            \
    if (!(condition)) throw std::invalid_argument(::flash::message(__VA_ARGS__)); \
  } while (false)

// FLASH_CHECK_CUDA(cudaGetLastError(), "fwd_sm90"): throws with CUDA's own words.
#define FLASH_CHECK_CUDA(call, what)                                                                               \
  do {                                                                                                             \
    const cudaError_t status = (call);                                                                             \
    if (status != cudaSuccess) throw std::runtime_error(::flash::message(what, ": ", cudaGetErrorString(status))); \
  } while (false)

namespace flash {

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace flash
