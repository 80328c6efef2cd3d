// What a kernel is told: pointers with shapes, strides, sizes and options. Plain C++, no CUDA, no torch.
#pragma once

#include <cstdint>

namespace flash {

enum class DType : uint8_t { kF32, kF16, kBF16, kE4M3 };

// One tensor of (batch, seqlen, heads, dim), or packed (total, heads, dim) with batch stride 0.
// Strides count elements; the last dimension is contiguous. A stride may be 0 (expanded heads) or odd.
struct Strided {
  void* ptr = nullptr;
  int64_t batch = 0, row = 0, head = 0;
};

// One fp32 number per query row: lse, delta. Dense (batch, num_heads, seqlen_q), packed (num_heads, total_q) with batch
// stride 0. Rows are contiguous.
struct RowStats {
  float* ptr = nullptr;
  int64_t batch = 0, head = 0;
};

// Additive bias, broadcast to (batch, num_heads, seqlen_q, seqlen_k) by strides of 0; fp32 or the dtype of q.
// In packed calls batch is the segment and row and column count from the segment's start.
struct Bias {
  const void* ptr = nullptr;
  int64_t batch = 0, head = 0, row = 0, col = 0;
  bool is_f32 = false;
};

// What both directions share.
struct AttnParams {
  Strided q;  // (batch, seqlen_q, num_heads, head_dim)
  Strided k;  // (batch, seqlen_k, num_heads_kv, head_dim)
  Strided v;  // (batch, seqlen_k, num_heads_kv, head_dim_v)

  DType dtype = DType::kF32;
  int batch = 0;
  int seqlen_q = 0, seqlen_k = 0;    // packed: the longest segment
  int64_t total_q = 0, total_k = 0;  // rows that exist in memory: batch * seqlen, or the packed length
  int num_heads = 0, num_heads_kv = 0;
  int head_dim = 0, head_dim_v = 0;

  const int32_t* cu_seqlens_q = nullptr;  // (batch + 1), nullptr: dense
  const int32_t* cu_seqlens_k = nullptr;  // (batch + 1), nullptr: dense
  const int32_t* seqused_k = nullptr;     // (batch), nullptr: all keys are used

  float softmax_scale = 1.f;
  // Query i sees keys i + seqlen_k - seqlen_q - window_left ... i + seqlen_k - seqlen_q + window_right; -1: unbounded.
  // Causal is window_right = 0. The Python layer has replaced bounds that cut nothing by -1.
  int window_left = -1, window_right = -1;

  // Served by the general variant of a kernel, switched at run time.
  float softcap = 0.f;                  // 0: off
  const float* alibi_slopes = nullptr;  // (num_heads) or (batch, num_heads), fp32
  int64_t alibi_batch_stride = 0;       // 0 for (num_heads)
  Bias bias;
  const float* sinks = nullptr;  // (num_heads), fp32
  float dropout_p = 0.f;
  const int64_t* rng_state = nullptr;  // (2): seed, offset; device memory for GPU kernels

  bool deterministic = false;
  int device = 0;  // CUDA device index of the tensors

  bool packed() const { return cu_seqlens_q != nullptr || cu_seqlens_k != nullptr; }
  // What plain kernels do not do to scores and probabilities. They take the maximum of q.k and scale afterwards, which
  // only a positive scale allows.
  bool changes_scores() const {
    return softcap != 0.f || alibi_slopes != nullptr || bias.ptr != nullptr || dropout_p != 0.f ||
           !(softmax_scale > 0.f);
  }
};

struct FwdParams : AttnParams {
  Strided out;   // (batch, seqlen_q, num_heads, head_dim_v)
  RowStats lse;  // (batch, num_heads, seqlen_q)
  // FP8 only, fp32 (batch, num_heads_kv) each, strides in elements (0: broadcast); nullptr: 1
  const float *q_descale = nullptr, *k_descale = nullptr, *v_descale = nullptr;
  int64_t q_descale_strides[2] = {0, 0}, k_descale_strides[2] = {0, 0}, v_descale_strides[2] = {0, 0};
  DType out_dtype = DType::kF32;  // FP8 only: kF16 or kBF16; elsewhere out has the dtype of q
  void* workspace = nullptr;      // as many bytes as the row's workspace function asked for; not initialised
};

struct BwdParams : AttnParams {
  Strided out, dout;   // (batch, seqlen_q, num_heads, head_dim_v)
  RowStats lse;        // (batch, num_heads, seqlen_q), of the forward
  RowStats dlse;       // gradient of lse; ptr nullptr: none
  RowStats delta;      // written by every backward: rowsum(dout * out) - dlse
  Strided dq, dk, dv;  // shapes of q, k, v and their dtype; every element is written
  // dbias, fp32, zero-filled by the caller: shape (batch|1, num_heads|1, seqlen_q|1, seqlen_k|1) contiguous with stride
  // 0 where broadcast; ptr nullptr: not wanted.
  Bias dbias;
  void* workspace = nullptr;  // as many bytes as the row's workspace function asked for; not initialised
};

}  // namespace flash
