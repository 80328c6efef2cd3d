// Where one sequence of the batch lies, dense or packed.
#pragma once

#include "../params.h"
#include "host_device.h"

namespace flash {

struct SeqInfo {
  int64_t q0, k0;          // first row in packed tensors; 0 when dense (the batch stride leads there)
  int seqlen_q, seqlen_k;  // rows of this sequence

  // Lengths are clamped to the memory that exists, so that wrong cu_seqlens on the device cannot reach foreign memory.
  FLASH_HD static SeqInfo of(const AttnParams& p, int batch_index) {
    SeqInfo s{0, 0, p.seqlen_q, p.seqlen_k};
    if (p.cu_seqlens_q) segment(p.cu_seqlens_q, batch_index, p.total_q, p.seqlen_q, s.q0, s.seqlen_q);
    if (p.cu_seqlens_k) segment(p.cu_seqlens_k, batch_index, p.total_k, p.seqlen_k, s.k0, s.seqlen_k);
    if (p.seqused_k) s.seqlen_k = max_of(0, min_of(s.seqlen_k, p.seqused_k[batch_index]));
    return s;
  }

  // Keys of the sequence in memory, used or not: what a backward has to write.
  FLASH_HD static int rows_of_k(const AttnParams& p, int batch_index) {
    int64_t start = 0;
    int rows = p.seqlen_k;
    if (p.cu_seqlens_k) segment(p.cu_seqlens_k, batch_index, p.total_k, p.seqlen_k, start, rows);
    return rows;
  }

 private:
  FLASH_HD static void segment(const int32_t* cu, int i, int64_t total, int longest, int64_t& start, int& length) {
    int64_t begin = cu[i], end = cu[i + 1];
    begin = begin < 0 ? 0 : begin > total ? total : begin;
    end = end < begin ? begin : end > total ? total : end;
    start = begin;
    length = int(end - begin < longest ? end - begin : longest);
  }
};

// Element offset of row `row` of the sequence, head `head`.
FLASH_HD int64_t offset_of(const Strided& t, int batch_index, int64_t first_row, int row, int head) {
  return batch_index * t.batch + (first_row + row) * t.row + head * t.head;
}
FLASH_HD int64_t offset_of(const RowStats& t, int batch_index, int64_t first_row, int row, int head) {
  return batch_index * t.batch + head * t.head + first_row + row;
}

}  // namespace flash
