// Backward pass on the CPU: FlashAttention (Dao et al. 2022, algorithm 4). The probabilities are not stored by the
// forward: they are computed again, tile by tile, from q, k and lse. Key tiles are the outer loop: a task owns dk and
// dv of its tile and adds to dq of every query tile that sees it.
//
// With P = exp(S - lse), Z the dropout factors (1 without dropout) and delta = rowsum(dout * out) - dlse:
//   dv = (P Z)^T dout     dP = Z (dout v^T)     dS = P (dP - delta)     dq = scale dS k     dk = scale dS^T q
#include <atomic>
#include <cmath>
#include <memory>

#include "../api.h"
#include "bwd_tile.h"
#include "call.h"
#include "dbias.h"
#include "parallel.h"

namespace flash {

namespace cpu {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// delta = rowsum(dout * out) - dlse. A row without keys has no gradient, whatever arrives for its lse of -inf.
template <class T>
void compute_delta(const BwdParams& p, int batch_index, int head) {
  const SeqInfo seq = SeqInfo::of(p, batch_index);
  const float* const lse = p.lse.ptr + offset_of(p.lse, batch_index, seq.q0, 0, head);
  float* const delta = p.delta.ptr + offset_of(p.delta, batch_index, seq.q0, 0, head);
  for (int i = 0; i < seq.seqlen_q; i++) {
    const T* const out = static_cast<const T*>(p.out.ptr) + offset_of(p.out, batch_index, seq.q0, i, head);
    const T* const dout = static_cast<const T*>(p.dout.ptr) + offset_of(p.dout, batch_index, seq.q0, i, head);
    float sum = p.dlse.ptr ? -p.dlse.ptr[offset_of(p.dlse, batch_index, seq.q0, i, head)] : 0.f;
    for (int d = 0; d < p.head_dim_v; d++) sum += to_float(dout[d]) * to_float(out[d]);
    delta[i] = lse[i] == -kInf ? 0.f : sum;
  }
}

// dq is the sum over key tiles, whose tasks run side by side: it is kept in fp32, and key tiles add to a query tile in
// ascending order, so that the result does not depend on scheduling. A task runs through the query tiles in ascending
// order as well: tasks follow each other like carriages, and hardly ever wait.
class DQ {
 public:
  explicit DQ(const BwdParams& p)
      : ld_(padded(p.head_dim)),
        m_blocks_(ceil_div(p.seqlen_q, kBlockM)),
        num_heads_(p.num_heads),
        total_q_(p.total_q),
        sum_(total_q_ * num_heads_ * ld_),
        next_(new std::atomic<int>[p.batch * num_heads_ * m_blocks_]) {
    std::fill_n(+sum_, total_q_ * num_heads_ * ld_, 0.f);
    for (int b = 0; b < p.batch; b++) {
      const Band band = Band::of(p, SeqInfo::of(p, b));
      for (int head = 0; head < p.num_heads; head++)
        for (int m_block = 0; m_block < m_blocks_; m_block++)
          next(b, head, m_block) = key_blocks(band, m_block * kBlockM, kBlockM, kBlockN).begin;
    }
  }

  // (rows, padded(head_dim)) from query `row` of the tensor on; rows of a head are contiguous.
  float* rows(int64_t row, int head) const { return sum_ + (head * total_q_ + row) * ld_; }

  // Holds the right to add to a query tile until the end of the scope.
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
  Turn wait_for_turn(int batch_index, int head, int m_block, int n_block) const {
    return Turn(next(batch_index, head, m_block), n_block);
  }

 private:
  // The key tile that adds next to a query tile.
  std::atomic<int>& next(int batch_index, int head, int m_block) const {
    return next_[(batch_index * num_heads_ + head) * m_blocks_ + m_block];
  }

  int ld_;
  int64_t m_blocks_, num_heads_, total_q_;
  Buffer sum_;                                // (num_heads, total_q, padded(head_dim))
  std::unique_ptr<std::atomic<int>[]> next_;  // (batch, num_heads, m_blocks)
};

// First query of a sequence in DQ.
int64_t first_row(const BwdParams& p, const SeqInfo& seq, int batch_index) {
  return p.cu_seqlens_q ? seq.q0 : int64_t(batch_index) * p.seqlen_q;
}

// Keys n_block * kBlockN ... of one kv head: dk and dv, and what they add to dq.
template <class T>
void bwd_block(const BwdParams& p, int batch_index, int head_kv, int n_block, const DQ& dq, const BwdTiles& t) {
  const TileOps& ops = tile_ops();
  const SeqInfo seq = SeqInfo::of(p, batch_index);
  const Band band = Band::of(p, seq);
  const int col0 = n_block * kBlockN, cols = min_of(kBlockN, seq.seqlen_k - col0);
  if (cols <= 0) return;
  const int ld_k = padded(p.head_dim), ld_v = padded(p.head_dim_v), group = p.num_heads / p.num_heads_kv;

  load_keys<T>(p, seq, batch_index, head_kv, n_block, t);
  std::fill_n(+t.dk, cols * ld_k, 0.f);
  std::fill_n(+t.dv, cols * ld_v, 0.f);

  const BlockRange blocks = query_blocks(band, col0, cols, kBlockM);
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

      const DQ::Turn turn = dq.wait_for_turn(batch_index, head, m_block, n_block);
      float* const dq_rows = dq.rows(first_row(p, seq, batch_index) + row0, head);
      ops.matmul({dq_rows, ld_k}, dscores, {t.k, ld_k}, {rows, ld_k, cols}, {p.softmax_scale, true});
    }
  }
  T* const dk = static_cast<T*>(p.dk.ptr) + offset_of(p.dk, batch_index, seq.k0, col0, head_kv);
  T* const dv = static_cast<T*>(p.dv.ptr) + offset_of(p.dv, batch_index, seq.k0, col0, head_kv);
  store_rows(dk, p.dk.row, t.dk, nullptr, cols, p.head_dim);
  store_rows(dv, p.dv.row, t.dv, nullptr, cols, p.head_dim_v);
}

// Calls body(batch_index, first_row, rows) for the rows of a tensor: per batch element, or once for a packed tensor.
template <class Body>
void for_each_span(const int32_t* cu_seqlens, int batch, int seqlen, int64_t total, const Body& body) {
  if (cu_seqlens) return body(0, total);
  for (int b = 0; b < batch; b++) body(b, seqlen);
}

template <class T>
void bwd(const BwdParams& p, int threads) {
  // Rows that no query sees, or that belong to no sequence, keep this zero.
  for_each_span(p.cu_seqlens_k, p.batch, p.seqlen_k, p.total_k, [&](int b, int64_t rows) {
    clear_rows<T>(p.dk, b, 0, rows, p.num_heads_kv, p.head_dim);
    clear_rows<T>(p.dv, b, 0, rows, p.num_heads_kv, p.head_dim_v);
  });
  const int64_t n_blocks = ceil_div(p.seqlen_k, kBlockN), tasks = n_blocks * p.num_heads_kv * p.batch;
  const int workers = workers_for(p, std::max(tasks, int64_t(1)), threads);
  parallel_for(int64_t(p.batch) * p.num_heads, workers,
               [&](int64_t matrix, int) { compute_delta<T>(p, int(matrix / p.num_heads), int(matrix % p.num_heads)); });

  const DQ dq(p);
  const std::vector<BwdTiles> tiles = tiles_for<BwdTiles>(p, workers);
  parallel_for(tasks, workers, [&](int64_t task, int worker) {
    const int64_t matrix = task / n_blocks;
    bwd_block<T>(p, int(matrix / p.num_heads_kv), int(matrix % p.num_heads_kv), int(task % n_blocks), dq,
                 tiles[worker]);
  });
  for_each_span(p.cu_seqlens_q, p.batch, p.seqlen_q, p.total_q, [&](int b, int64_t rows) {
    for (int head = 0; head < p.num_heads; head++)
      store_rows(static_cast<T*>(p.dq.ptr) + offset_of(p.dq, b, 0, 0, head), p.dq.row, dq.rows(b * rows, head), nullptr,
                 rows, p.head_dim);
  });
  if (p.dbias.ptr) compute_dbias<T>(p, workers, tiles);
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
