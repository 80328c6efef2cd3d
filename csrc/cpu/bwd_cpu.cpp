// Backward pass on the CPU: FlashAttention (Dao et al. 2022, algorithm 4). The forward does not store the
// probabilities: they are computed again, tile by tile, from q, k and lse. Key tiles are the outer loop: a task owns dk
// and dv of its tile and adds to dq of every query tile that sees it.
//
// With P = exp(S - lse), Z the factors of dropout (1 without) and delta = rowsum(dout * out) - dlse:
//   dv = (P Z)^T dout     dP = Z (dout v^T)     dS = P (dP - delta)     dq = scale dS k     dk = scale dS^T q
#include <atomic>
#include <cstdlib>
#include <memory>

#include "../api.h"
#include "bwd_tile.h"
#include "call.h"
#include "dbias.h"
#include "parallel.h"

namespace flash {

namespace cpu {

namespace {

// dq is the sum over key tiles, whose tasks run side by side: it is kept in fp32, and key tiles add to a query tile in
// ascending order, so that the result does not depend on scheduling. Every task also runs through its query tiles in
// ascending order: tasks of a head follow each other like carriages, and wait for each other at the start only.
class DQ {
 public:
  explicit DQ(const BwdParams& p)
      : ld_(padded(p.head_dim)),
        m_blocks_(ceil_div(p.seqlen_q, kBlockM)),
        num_heads_(p.num_heads),
        total_q_(p.total_q),
        // calloc: fresh memory is zero without being touched.
        sum_(static_cast<float*>(std::calloc(total_q_ * num_heads_ * ld_, sizeof(float)))),
        next_(new std::atomic<int>[p.batch * num_heads_ * m_blocks_]) {
    if (!sum_) throw std::bad_alloc();
  }

  // (rows, padded(head_dim)) from query `row` of the tensor on; rows of a head are contiguous.
  Tile from_row(int64_t row, int head) const { return {sum_.get() + (head * total_q_ + row) * ld_, ld_}; }

  // The key tile that adds next to a query tile.
  std::atomic<int>& next(int batch_index, int head, int m_block) const {
    return next_[(batch_index * num_heads_ + head) * m_blocks_ + m_block];
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  int64_t ld_, m_blocks_, num_heads_, total_q_;
  std::unique_ptr<float, Free> sum_;          // (num_heads, total_q, padded(head_dim))
  std::unique_ptr<std::atomic<int>[]> next_;  // (batch, num_heads, m_blocks)
};

// Waits until it is the turn of key tile `n_block`, and holds it to the end of the scope.
class Turn {
 public:
  Turn(std::atomic<int>& next, int n_block) : next_(next) {
    for (int now = next_; now != n_block; now = next_) next_.wait(now);
  }
  ~Turn() {
    next_++;
    next_.notify_all();
  }
  Turn(const Turn&) = delete;

 private:
  std::atomic<int>& next_;
};

// Before the main loop, for queries m_block * kBlockM ... of one head: delta = rowsum(dout * out) - dlse, and who is
// the first to add to dq.
template <class T>
void prepare_queries(const BwdParams& p, int batch_index, int head, int m_block, const DQ& dq) {
  const SeqInfo seq = SeqInfo::of(p, batch_index);
  const int row0 = m_block * kBlockM, rows = min_of(kBlockM, seq.seqlen_q - row0);
  if (rows <= 0) return;
  const BlockRange keys = key_blocks(Band::of(p, seq), row0, rows, kBlockN);
  dq.next(batch_index, head, m_block) = keys.begin;
  if (keys.count() == 0)  // no task will come by
    for (int i = 0; i < rows; i++) std::fill_n(row_of<T>(p.dq, batch_index, seq.q0, row0 + i, head), p.head_dim, T{});

  for (int i = row0; i < row0 + rows; i++) {
    const T* const out = row_of<const T>(p.out, batch_index, seq.q0, i, head);
    const T* const dout = row_of<const T>(p.dout, batch_index, seq.q0, i, head);
    float sum = p.dlse.ptr ? -*row_of(p.dlse, batch_index, seq.q0, i, head) : 0.f;
    for (int d = 0; d < p.head_dim_v; d++) sum += to_float(dout[d]) * to_float(out[d]);
    // A row without keys has no gradient, whatever arrives for its lse of -inf.
    const bool no_keys = *row_of(p.lse, batch_index, seq.q0, i, head) == -kInf;
    *row_of(p.delta, batch_index, seq.q0, i, head) = no_keys ? 0.f : sum;
  }
}

// Keys n_block * kBlockN ... of one kv head: dk and dv, and what they add to dq.
template <class T>
void bwd_block(const BwdParams& p, int batch_index, int head_kv, int n_block, const DQ& dq, const BwdTiles& t) {
  const TileOps& ops = tile_ops();
  const SeqInfo seq = SeqInfo::of(p, batch_index);
  const Band band = Band::of(p, seq);
  // Rows past the used keys are not read, but their gradients are written.
  const int col0 = n_block * kBlockN, cols = min_of(kBlockN, seq.seqlen_k - col0);
  const int cols_in_memory = min_of(kBlockN, SeqInfo::rows_of_k(p, batch_index) - col0);
  if (cols_in_memory <= 0) return;
  const int ld_k = padded(p.head_dim), ld_v = padded(p.head_dim_v), group = p.num_heads / p.num_heads_kv;

  if (cols > 0) load_keys<T>(p, seq, batch_index, head_kv, n_block, t);
  std::fill_n(+t.dk, cols_in_memory * ld_k, 0.f);
  std::fill_n(+t.dv, cols_in_memory * ld_v, 0.f);

  const BlockRange blocks = query_blocks(band, col0, kBlockN, kBlockM);
  for (int head = head_kv * group; head < (head_kv + 1) * group; head++) {
    for (int m_block = blocks.begin; m_block < blocks.end; m_block++) {
      const int row0 = m_block * kBlockM, rows = min_of(kBlockM, seq.seqlen_q - row0);
      load_queries<T>(p, seq, batch_index, head, m_block, t);
      compute_dscores<T>(p, seq, {batch_index, head, m_block, n_block}, blocks.needs_mask(m_block), t);
      if (p.softcap != 0.f)
        for (int i = 0; i < rows; i++)
          for (int j = 0; j < cols; j++) t.dscores[i * kBlockN + j] *= t.derivative[i * kBlockN + j];

      const Tile probs{p.dropout_p != 0.f ? t.kept : t.probs, kBlockN}, dscores{t.dscores, kBlockN};
      ops.matmul({t.dv, ld_v}, transposed(probs), {t.dout, ld_v}, {cols, ld_v, rows}, {1.f, true});
      ops.matmul({t.dk, ld_k}, transposed(dscores), {t.q, ld_k}, {cols, ld_k, rows}, {p.softmax_scale, true});

      const Turn turn(dq.next(batch_index, head, m_block), n_block);
      const Tile sum = dq.from_row(seq.q0 + (p.cu_seqlens_q ? 0 : int64_t(batch_index) * p.seqlen_q) + row0, head);
      ops.matmul(sum, dscores, {t.k, ld_k}, {rows, ld_k, cols}, {p.softmax_scale, true});
      if (n_block + 1 == key_blocks(band, row0, rows, kBlockN).end)  // the last to add
        store_rows(row_of<T>(p.dq, batch_index, seq.q0, row0, head), p.dq.row, sum.data, nullptr, rows, p.head_dim);
    }
  }
  T* const dk = row_of<T>(p.dk, batch_index, seq.k0, col0, head_kv);
  T* const dv = row_of<T>(p.dv, batch_index, seq.k0, col0, head_kv);
  store_rows(dk, p.dk.row, t.dk, nullptr, cols_in_memory, p.head_dim);
  store_rows(dv, p.dv.row, t.dv, nullptr, cols_in_memory, p.head_dim_v);
}

// Rows of packed tensors that no sequence owns get a gradient of zero.
template <class T>
void clear_gaps(const BwdParams& p) {
  const auto queries = [&](int b) {
    const SeqInfo seq = SeqInfo::of(p, b);
    return std::pair(seq.q0, seq.seqlen_q);
  };
  const auto keys = [&](int b) { return std::pair(SeqInfo::of(p, b).k0, SeqInfo::rows_of_k(p, b)); };
  if (p.cu_seqlens_q)
    for_each_gap(p.batch, p.total_q, queries,
                 [&](int64_t row, int64_t rows) { clear_rows<T>(p.dq, 0, row, rows, p.num_heads, p.head_dim); });
  if (p.cu_seqlens_k)
    for_each_gap(p.batch, p.total_k, keys, [&](int64_t row, int64_t rows) {
      clear_rows<T>(p.dk, 0, row, rows, p.num_heads_kv, p.head_dim);
      clear_rows<T>(p.dv, 0, row, rows, p.num_heads_kv, p.head_dim_v);
    });
}

template <class T>
void bwd(const BwdParams& p, int threads) {
  clear_gaps<T>(p);
  const DQ dq(p);
  const int64_t m_blocks = ceil_div(p.seqlen_q, kBlockM), m_tasks = m_blocks * p.num_heads * p.batch;
  const int64_t n_blocks = ceil_div(p.seqlen_k, kBlockN), n_tasks = n_blocks * p.num_heads_kv * p.batch;
  const int workers = workers_for(p, std::max(m_tasks, n_tasks), threads);
  const std::vector<BwdTiles> tiles = tiles_for<BwdTiles>(p, workers);

  parallel_for(m_tasks, workers, [&](int64_t task, int) {
    const int64_t matrix = task / m_blocks;
    prepare_queries<T>(p, int(matrix / p.num_heads), int(matrix % p.num_heads), int(task % m_blocks), dq);
  });
  // Heads side by side, their key tiles one after another: a task seldom meets another one of its head.
  const int64_t matrices = int64_t(p.batch) * p.num_heads_kv;
  parallel_for(n_tasks, workers, [&](int64_t task, int worker) {
    const int64_t matrix = task % matrices;
    bwd_block<T>(p, int(matrix / p.num_heads_kv), int(matrix % p.num_heads_kv), int(task / matrices), dq,
                 tiles[worker]);
  });
  if (p.dbias.ptr) compute_dbias<T>(p, tiles);
}

}  // namespace

}  // namespace cpu

void bwd_cpu(const BwdParams& p, int threads) {
  cpu::check(p, threads);
  switch (p.dtype) {
    case DType::kF32:
      return cpu::bwd<float>(p, threads);
    case DType::kF16:
      return cpu::bwd<cpu::Half>(p, threads);
    case DType::kBF16:
      return cpu::bwd<cpu::BFloat16>(p, threads);
    default:
      break;
  }
}

}  // namespace flash
