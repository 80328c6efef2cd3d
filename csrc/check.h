// The two host checks. Python turns std::invalid_argument into ValueError and std::runtime_error into RuntimeError.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

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

// Without streams, whose headers every kernel file would read four times.
template <class... Parts>
std::string message(const Parts&... parts) {
  const auto text = [](const auto& part) -> std::string {
    if constexpr (std::is_floating_point_v<std::remove_cvref_t<decltype(part)>>) {
      char digits[32];
      std::snprintf(digits, sizeof(digits), "%g", double(part));
      return digits;
    } else if constexpr (requires { std::to_string(part); }) {
      return std::to_string(part);
    } else {
      return part;
    }
  };
  return (text(parts) + ...);
}

}  // namespace flash
