// Which numbers of a warp's tile lie in which lane, for the two kinds of product. Score tiles are the result of the
// first product and the left operand of the second; output tiles are the result of the second.
#pragma once

#include "../attn/host_device.h"

namespace flash::simt {

// FMA: 4 x 8 lanes own interleaved rows and columns. Row bits are lane bits 0 and 4: neighbouring lanes then read the
// same 16 bytes of the column operand, and half a warp reads 8 different ones, which is one pass over the banks.
struct FmaLanes {
  static constexpr int kLaneRows = 4, kLaneCols = 8;
  static constexpr int kFirstColBit = 2, kLastColBit = 8;  // lanes that differ in these bits only share a row
  static constexpr int kOutRun = 4;  // neighbouring numbers of an output tile that lie side by side

  FLASH_HD static constexpr int lane_row(int lane) { return (lane & 1) | (lane >> 3 & 2); }
  FLASH_HD static constexpr int lane_col(int lane) { return lane >> 1 & 7; }
  FLASH_HD static constexpr int row(int lane, int r) { return lane_row(lane) + kLaneRows * r; }
  FLASH_HD static constexpr int score_col(int lane, int c) { return lane_col(lane) + kLaneCols * c; }
  FLASH_HD static constexpr int out_col(int lane, int c) { return 32 * (c / 4) + 4 * lane_col(lane) + c % 4; }
};

// The accumulators of mma m16n8k8, one beside the other: lane = 4 * g + q owns rows g, g + 8 and columns 2q, 2q + 1.
struct MmaLanes {
  static constexpr int kLaneRows = 8, kLaneCols = 4;
  static constexpr int kFirstColBit = 1, kLastColBit = 2;
  static constexpr int kOutRun = 2;

  FLASH_HD static constexpr int lane_row(int lane) { return lane >> 2; }
  FLASH_HD static constexpr int lane_col(int lane) { return lane & 3; }
  FLASH_HD static constexpr int row(int lane, int r) { return lane_row(lane) + kLaneRows * r; }
  FLASH_HD static constexpr int score_col(int lane, int c) { return 8 * (c / 2) + 2 * lane_col(lane) + c % 2; }
  FLASH_HD static constexpr int out_col(int lane, int c) { return score_col(lane, c); }
};

#ifdef __CUDACC__
// The same from inside a kernel.
template <class Lanes>
struct ThisLane : Lanes {
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int lane_row() { return Lanes::lane_row(lane()); }
  __device__ static int lane_col() { return Lanes::lane_col(lane()); }
  __device__ static int row(int r) { return Lanes::row(lane(), r); }
  __device__ static int score_col(int c) { return Lanes::score_col(lane(), c); }
  __device__ static int out_col(int c) { return Lanes::out_col(lane(), c); }
};
#endif

}  // namespace flash::simt
