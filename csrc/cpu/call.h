// What both directions do once per call: check the parameters, decide how many workers the work is worth, clear rows
// that belong to no sequence.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "../api.h"
#include "../attn/seqlen.h"
#include "../check.h"
#include "../params.h"
#include "tile.h"

namespace flash::cpu {

// Tiles count their elements in 32 bits, and a worker of a backward holds eight of them.
inline constexpr int kMaxHeadDim = 1 << 18;

inline void check(const AttnParams& p, int threads) {
  FLASH_CHECK_ARG(threads >= 1, "threads must be at least 1, got ", threads);
  FLASH_CHECK_ARG(p.dtype == DType::kF32 || p.dtype == DType::kF16 || p.dtype == DType::kBF16,
                  "dtype must be fp32, fp16 or bf16 on the CPU");
  check_params(p);
  FLASH_CHECK_ARG(p.head_dim <= kMaxHeadDim && p.head_dim_v <= kMaxHeadDim, "head_dim and head_dim_v must be at most ",
                  kMaxHeadDim, " on the CPU, got ", p.head_dim, " and ", p.head_dim_v);
}

// Starting a thread costs about as much as this many multiply-adds.
inline constexpr double kWorkPerThread = 4e6;

inline int workers_for(const AttnParams& p, int64_t tasks, int threads) {
  const double work = double(p.batch) * p.num_heads * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v);
  const double useful = std::min({double(threads), double(tasks), 1. + work / kWorkPerThread});
  return std::max(1, int(useful));
}

// One set of tiles per worker.
template <class Tiles, class Params>
std::vector<Tiles> tiles_for(const Params& p, int workers) {
  std::vector<Tiles> tiles;
  tiles.reserve(workers);
  for (int worker = 0; worker < workers; worker++) tiles.emplace_back(p);
  return tiles;
}

// Calls body(first_row, rows) for the rows of a packed tensor that no sequence owns; segment(b): first row and rows of
// one.
template <class Segment, class Body>
void for_each_gap(int batch, int64_t total, const Segment& segment, const Body& body) {
  int64_t row = 0;  // all before it are done
  for (int b = 0; b < batch; b++) {
    const auto [begin, rows] = segment(b);
    if (begin > row) body(row, begin - row);
    row = std::max<int64_t>(row, begin + rows);
  }
  if (total > row) body(row, total - row);
}

template <class T>
void clear_rows(const Strided& t, int batch_index, int64_t first_row, int64_t rows, int heads, int dim) {
  for (int64_t row = first_row; row < first_row + rows; row++)
    for (int head = 0; head < heads; head++) std::fill_n(row_of<T>(t, batch_index, row, 0, head), dim, T{});
}

}  // namespace flash::cpu
