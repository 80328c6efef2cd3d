// Maps of the tensors that both directions copy.
#pragma once

#include "../ptx/tensor_map.h"

namespace flash::sm90 {

// Coordinates of the copy engine, and the first rows of sequences in the kernels, are ints.
inline void check_rows(const AttnParams& p) {
  FLASH_CHECK_ARG(p.total_q < (int64_t(1) << 31) && p.total_k < (int64_t(1) << 31),
                  "at most 2^31 - 1 rows are supported, got ", p.total_q, " queries and ", p.total_k, " keys");
}

// Of q or dout; `box_rows` at a time.
inline CUtensorMap map_of_queries(const Strided& t, const AttnParams& p, int columns, int box_rows, const char* name) {
  const bool packed = p.cu_seqlens_q != nullptr;
  const ptx::TensorShape shape{packed ? p.total_q : p.seqlen_q, p.num_heads, packed ? 1 : p.batch, columns};
  return ptx::tensor_map(t, shape, p.dtype, box_rows, name);
}

// Of k or v.
inline CUtensorMap map_of_keys(const Strided& t, const AttnParams& p, int columns, int box_rows, const char* name) {
  const bool packed = p.cu_seqlens_k != nullptr;
  const ptx::TensorShape shape{packed ? p.total_k : p.seqlen_k, p.num_heads_kv, packed ? 1 : p.batch, columns};
  return ptx::tensor_map(t, shape, p.dtype, box_rows, name);
}

}  // namespace flash::sm90
