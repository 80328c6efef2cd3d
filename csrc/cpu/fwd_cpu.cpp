// Forward pass on the CPU: FlashAttention (Dao et al. 2022, algorithm 1) with the query tile in the outer loop, so that
// its output is written once. The softmax is online (Milakov & Gimelshein 2018): keys arrive tile by tile, and what was
// summed under an older maximum is rescaled. Nothing of size seqlen_q * seqlen_k is ever stored.
#include <cmath>

#include "../api.h"
#include "call.h"
#include "parallel.h"
#include "scores.h"
#include "tile.h"

namespace flash {

namespace cpu {

namespace {

// The tiles of one worker.
struct FwdTiles {
  Buffer q;                          // (head_dim, kBlockM): transposed
  Buffer k;                          // (kBlockN, head_dim)
  Buffer v;                          // (kBlockN, head_dim_v)
  Buffer scores;                     // (kBlockN, kBlockM): transposed
  Buffer out;                        // (kBlockM, head_dim_v), before the division by row_sum
  Buffer row_max, row_sum, rescale;  // (kBlockM)

  explicit FwdTiles(const FwdParams& p)
      : q(p.head_dim * kBlockM),
        k(kBlockN * padded(p.head_dim)),
        v(kBlockN * padded(p.head_dim_v)),
        scores(kBlockN * kBlockM),
        out(kBlockM * padded(p.head_dim_v)),
        row_max(kBlockM),
        row_sum(kBlockM),
        rescale(kBlockM) {}
};

// A sink is one more key, of score `sink`, whose value is zero.
void begin_softmax(const FwdParams& p, int head, const FwdTiles& t) {
  const float sink = p.sinks ? p.sinks[head] : -kInf;
  std::fill_n(+t.row_max, kBlockM, sink);
  std::fill_n(+t.row_sum, kBlockM, sink == -kInf ? 0.f : 1.f);
}

// row_max, row_sum -> lse; row_sum becomes the factor of the output. A row that saw nothing: 0 and -inf.
void finish_softmax(const FwdTiles& t, float* lse, int rows) {
  for (int i = 0; i < rows; i++) {
    const float sum = t.row_sum[i];
    lse[i] = sum == 0.f ? -kInf : t.row_max[i] + std::log(sum);
    t.row_sum[i] = sum == 0.f ? 0.f : 1.f / sum;
  }
}

// Queries m_block * kBlockM ... of one head.
//
// Scores are kept transposed, keys by queries: neither k nor v needs a transpose, and the maxima and sums of kPad
// queries stand side by side in vector lanes.
template <class T>
void fwd_block(const FwdParams& p, int batch_index, int head, int m_block, const FwdTiles& t) {
  const TileOps& ops = tile_ops();
  const SeqInfo seq = SeqInfo::of(p, batch_index);
  const Band band = Band::of(p, seq);
  const int row0 = m_block * kBlockM, rows = min_of(kBlockM, seq.seqlen_q - row0);
  if (rows <= 0) return;
  const int lanes = padded(rows), ld_k = padded(p.head_dim), ld_v = padded(p.head_dim_v);
  const int head_kv = head / (p.num_heads / p.num_heads_kv);
  const bool modified = modifies_scores(p);

  const T* const q = row_of<const T>(p.q, batch_index, seq.q0, row0, head);
  load_transposed<kBlockM>(t.q, q, p.q.row, rows, p.head_dim);
  begin_softmax(p, head, t);
  std::fill_n(+t.out, rows * ld_v, 0.f);

  const BlockRange blocks = key_blocks(band, row0, rows, kBlockN);
  for (int n_block = blocks.begin; n_block < blocks.end; n_block++) {
    const int col0 = n_block * kBlockN, cols = min_of(kBlockN, seq.seqlen_k - col0);
    const T* const k = row_of<const T>(p.k, batch_index, seq.k0, col0, head_kv);
    const T* const v = row_of<const T>(p.v, batch_index, seq.k0, col0, head_kv);
    load_rows(t.k, k, p.k.row, cols, p.head_dim);
    load_rows(t.v, v, p.v.row, cols, p.head_dim_v);

    // scores^T = k q^T
    ops.matmul({t.scores, kBlockM}, Tile{t.k, ld_k}, {t.q, kBlockM}, {cols, lanes, p.head_dim},
               {modified ? 1.f : p.softmax_scale, false});
    const ScoreTile scores{t.scores, 1, kBlockM, row0, col0, rows, cols};
    if (modified) modify_scores<T>(p, band, batch_index, head, scores, nullptr);
    if (blocks.needs_mask(n_block)) mask_scores(band, scores, cols);

    ops.online_softmax(t.scores, cols, lanes, t.row_max, t.row_sum, t.rescale);
    if (p.dropout_p != 0.f) apply_dropout(p, batch_index, head, scores);

    // out = rescale * out + probs v
    ops.scale_rows(t.out, rows, ld_v, t.rescale);
    ops.matmul({t.out, ld_v}, transposed({t.scores, kBlockM}), {t.v, ld_v}, {rows, ld_v, cols}, {1.f, true});
  }

  finish_softmax(t, row_of(p.lse, batch_index, seq.q0, row0, head), rows);
  T* const out = row_of<T>(p.out, batch_index, seq.q0, row0, head);
  store_rows(out, p.out.row, t.out, t.row_sum, rows, p.head_dim_v);
}

// Rows of a packed call that no sequence owns get the result of a row without keys.
template <class T>
void clear_gaps(const FwdParams& p) {
  const auto segment = [&](int b) {
    const SeqInfo seq = SeqInfo::of(p, b);
    return std::pair(seq.q0, seq.seqlen_q);
  };
  for_each_gap(p.batch, p.total_q, segment, [&](int64_t row, int64_t rows) {
    clear_rows<T>(p.out, 0, row, rows, p.num_heads, p.head_dim_v);
    for (int head = 0; head < p.num_heads; head++) std::fill_n(row_of(p.lse, 0, row, 0, head), rows, -kInf);
  });
}

template <class T>
void fwd(const FwdParams& p, int threads) {
  const int64_t m_blocks = ceil_div(p.seqlen_q, kBlockM), tasks = m_blocks * p.num_heads * p.batch;
  const int workers = workers_for(p, tasks, threads);
  const std::vector<FwdTiles> tiles = tiles_for<FwdTiles>(p, workers);
  if (p.cu_seqlens_q) clear_gaps<T>(p);
  parallel_for(tasks, workers, [&](int64_t task, int worker) {
    const int m_block = int(m_blocks - 1 - task % m_blocks);  // with a causal mask the last take longest: they go first
    const int64_t matrix = task / m_blocks;
    fwd_block<T>(p, int(matrix / p.num_heads), int(matrix % p.num_heads), m_block, tiles[worker]);
  });
}

}  // namespace

}  // namespace cpu

void fwd_cpu(const FwdParams& p, int threads) {
  cpu::check(p, threads);
  switch (p.dtype) {
    case DType::kF32:
      return cpu::fwd<float>(p, threads);
    case DType::kF16:
      return cpu::fwd<cpu::Half>(p, threads);
    case DType::kBF16:
      return cpu::fwd<cpu::BFloat16>(p, threads);
    default:
      break;
  }
}

}  // namespace flash
