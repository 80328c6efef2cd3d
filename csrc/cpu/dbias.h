// The gradient of the additive bias: the gradient of the scores, summed over the dimensions that the bias was broadcast
// over.
#pragma once

#include <vector>

#include "bwd_tile.h"
#include "parallel.h"

namespace flash::cpu {

// One dimension of (batch, num_heads, m_blocks, n_blocks): where the bias has it, its indices are tasks of their own;
// where the bias was broadcast, one task sums over it in order. No two tasks write the same element.
struct DBiasDim {
  int size;
  bool own;
  int tasks() const { return own ? size : 1; }
  int begin(int task) const { return own ? task : 0; }
  int end(int task) const { return own ? task + 1 : size; }
};

template <class T>
void dbias_tile(const BwdParams& p, const BwdPlace& at, const BwdTiles& t) {
  const SeqInfo seq = SeqInfo::of(p, at.batch_index);
  const int row0 = at.m_block * kBlockM, rows = min_of(kBlockM, seq.seqlen_q - row0);
  const int col0 = at.n_block * kBlockN, cols = min_of(kBlockN, seq.seqlen_k - col0);
  const BlockRange blocks = key_blocks(Band::of(p, seq), row0, kBlockM, kBlockN);
  if (at.n_block < blocks.begin || at.n_block >= blocks.end) return;

  load_keys<T>(p, seq, at.batch_index, at.head / (p.num_heads / p.num_heads_kv), at.n_block, t);
  load_queries<T>(p, seq, at.batch_index, at.head, at.m_block, t);
  compute_dscores<T>(p, seq, at, blocks.needs_mask(at.n_block), t);

  float* const dbias = static_cast<float*>(const_cast<void*>(p.dbias.ptr)) + at.batch_index * p.dbias.batch +
                       at.head * p.dbias.head + row0 * p.dbias.row + col0 * p.dbias.col;
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < cols; j++) dbias[i * p.dbias.row + j * p.dbias.col] += t.dscores[i * kBlockN + j];
}

template <class T>
void compute_dbias(const BwdParams& p, const std::vector<BwdTiles>& tiles) {
  const DBiasDim batch{p.batch, p.dbias.batch != 0}, heads{p.num_heads, p.dbias.head != 0};
  const DBiasDim m_blocks{ceil_div(p.seqlen_q, kBlockM), p.dbias.row != 0};
  const DBiasDim n_blocks{ceil_div(p.seqlen_k, kBlockN), p.dbias.col != 0};
  const int64_t tasks = int64_t(batch.tasks()) * heads.tasks() * m_blocks.tasks() * n_blocks.tasks();
  parallel_for(tasks, int(tiles.size()), [&](int64_t task, int worker) {
    const int n = int(task % n_blocks.tasks()), m = int(task / n_blocks.tasks() % m_blocks.tasks());
    const int h = int(task / n_blocks.tasks() / m_blocks.tasks() % heads.tasks());
    const int b = int(task / n_blocks.tasks() / m_blocks.tasks() / heads.tasks());
    for (int batch_index = batch.begin(b); batch_index < batch.end(b); batch_index++)
      for (int head = heads.begin(h); head < heads.end(h); head++)
        for (int m_block = m_blocks.begin(m); m_block < m_blocks.end(m); m_block++)
          for (int n_block = n_blocks.begin(n); n_block < n_blocks.end(n); n_block++)
            dbias_tile<T>(p, {batch_index, head, m_block, n_block}, tiles[worker]);
  });
}

}  // namespace flash::cpu
