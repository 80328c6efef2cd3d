// Where element (row, col) of a tile lies in shared memory, so that neither ldmatrix nor cp.async meets a bank
// conflict.
#pragma once

#include "../attn/host_device.h"

namespace flash::sm80 {

// A tile of 16-bit elements (kRows, kCols), cut into panels of 64 columns (32 where 64 does not divide). A panel's row
// is 128 (64) bytes in chunks of 16; chunk c of row r is stored in place c ^ (r % 8) (c ^ (r / 2 % 4)), so that the
// eight rows of an 8x8 matrix lie in different banks, while the lanes that copy a row still write one line. (Layouts
// without the exclusive or, whose fragments are constants apart, halve the speed of cp.async.) Tiles start at multiples
// of 128 bytes.
template <int kRows_, int kCols_>
struct SmemTile {
  static constexpr int kRows = kRows_, kCols = kCols_;
  static_assert(kRows % 8 == 0 && kCols % 32 == 0);
  static constexpr int kPanel = kCols % 64 == 0 ? 64 : 32;
  static constexpr int kRowBytes = 2 * kPanel;
  static constexpr int kBytes = 2 * kRows * kCols;

  FLASH_HD static constexpr int swizzle(int row) { return kPanel == 64 ? row & 7 : (row >> 1) & 3; }

  // Byte offset of the chunk that holds (row, col); col is a multiple of 8.
  FLASH_HD static constexpr int offset(int row, int col) {
    return col / kPanel * (kRows * kRowBytes) + row * kRowBytes + (((col % kPanel / 8) ^ swizzle(row)) << 4);
  }

  // offset(row + row0, col + col0) == (offset(row, col) ^ flip(col0)) + shift(row0, col0)
  // for row0 a multiple of 8, col0 a multiple of 16 and col in {0, 8}: one address per lane serves the whole tile.
  FLASH_HD static constexpr int flip(int col0) { return col0 % kPanel * 2; }
  FLASH_HD static constexpr int shift(int row0, int col0) {
    return col0 / kPanel * (kRows * kRowBytes) + row0 * kRowBytes;
  }
};

// How kThreads threads share the chunks of a tile on their way from or to global memory: a pass covers kRowsPerPass
// rows of a panel; eight (four) lanes take a row.
template <class Tile, int kThreads>
struct CopyLanes {
  static constexpr int kCols = Tile::kPanel;
  static constexpr int kLanesPerRow = kCols / 8, kRowsPerPass = kThreads / kLanesPerRow;
  static_assert(Tile::kRows % kRowsPerPass == 0 && (kRowsPerPass % 8 == 0 || kThreads == 32));

  FLASH_HD static constexpr int row(unsigned thread) { return int(thread / kLanesPerRow); }
  FLASH_HD static constexpr int col(unsigned thread) { return int(thread % kLanesPerRow * 8); }
};

}  // namespace flash::sm80
