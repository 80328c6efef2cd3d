// How the gradient of a broadcast bias is shared out: each CTA adds up a part of (batch, num_heads, query blocks, key
// blocks).
#pragma once

#include "../attn/host_device.h"
#include "../params.h"

namespace flash::simt {

// All of a broadcast dimension, one of any other.
struct BiasWork {
  int begin[4], end[4];  // batch_index, head, m_block, n_block

  // How many CTAs share a dimension, from its size: one where the bias has no stride.
  FLASH_HD static void split(const Bias& dbias, int (&sizes)[4]) {
    const int64_t strides[4] = {dbias.batch, dbias.head, dbias.row, dbias.col};
    for (int d = 0; d < 4; d++)
      if (strides[d] == 0) sizes[d] = min_of(sizes[d], 1);
  }

  FLASH_HD static BiasWork of(const Bias& dbias, int64_t cta, const int (&sizes)[4]) {
    int parts[4] = {sizes[0], sizes[1], sizes[2], sizes[3]};
    split(dbias, parts);
    BiasWork work;
    for (int d = 3; d >= 0; d--) {
      const int part = int(cta % parts[d]);
      cta /= parts[d];
      work.begin[d] = part;
      work.end[d] = parts[d] == 1 ? sizes[d] : part + 1;
    }
    return work;
  }
};

}  // namespace flash::simt
