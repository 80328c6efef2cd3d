// The columns of a row that one lane holds in accumulator fragments: from its first one on 0, 1, 8, 9, 16, 17 ...
#pragma once

#include <cstdint>

#include "../attn/host_device.h"

namespace flash::sm80 {

// How many of the lane's columns lie before `end`; both count from the lane's first.
FLASH_HD constexpr int lane_columns_before(int end, int col_tiles) {
  const int x = max_of(0, min_of(end, 8 * col_tiles));
  return x / 8 * 2 + min_of(x % 8, 2);
}

// Bit 2n + i: whether column 8n + i lies in [begin, end).
FLASH_HD constexpr uint32_t lane_columns(int begin, int end, int col_tiles) {
  return ((1u << lane_columns_before(end, col_tiles)) - 1) & ~((1u << lane_columns_before(begin, col_tiles)) - 1);
}

}  // namespace flash::sm80
