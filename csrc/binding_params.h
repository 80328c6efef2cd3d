// at::Tensor -> params. Part of binding.cpp, the only file that knows torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "api.h"
#include "check.h"

namespace {

using flash::AttnParams;
using flash::BwdParams;
using flash::FwdParams;
using Tensor = at::Tensor;
using MaybeTensor = std::optional<at::Tensor>;

// The numbers of a call.
struct Scalars {
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  double softmax_scale = 1.;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0., dropout_p = 0.;
  int64_t deterministic = 0;  // or 1; as wide as the others, so that no byte is left undefined
};

// Everything of a call but q, k, v and its results.
struct Options : Scalars {
  Options() = default;
  explicit Options(const Scalars& scalars) : Scalars(scalars) {}

  MaybeTensor cu_seqlens_q, cu_seqlens_k;       // (batch + 1) int32
  MaybeTensor seqused_k;                        // (batch) int32
  MaybeTensor alibi_slopes;                     // (num_heads) or (batch, num_heads) fp32
  MaybeTensor attn_bias;                        // expanded to (batch, num_heads, seqlen_q, seqlen_k), fp32 or q's dtype
  MaybeTensor sinks;                            // (num_heads) fp32
  MaybeTensor rng_state;                        // (2) int64
  MaybeTensor q_descale, k_descale, v_descale;  // expanded to (batch, num_heads_kv) fp32
  MaybeTensor workspace;                        // of a forward, as many bytes as fwd_workspace says
};

flash::DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return flash::DType::kF32;
    case at::kHalf:
      return flash::DType::kF16;
    case at::kBFloat16:
      return flash::DType::kBF16;
    case at::kFloat8_e4m3fn:
      return flash::DType::kE4M3;
    default:
      break;
  }
  throw std::invalid_argument(flash::message("dtype must be float32, float16, bfloat16 or float8_e4m3fn, got ",
                                             c10::toString(t.scalar_type())));
}

// A stride of a size-1 dimension means nothing and may be anything: 0 keeps address arithmetic and TMA maps sane.
int64_t stride_of(const Tensor& t, int dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); }

flash::Strided strided(const Tensor& t) {  // (batch, seqlen, heads, dim) or (total, heads, dim)
  if (t.dim() == 4) return {t.data_ptr(), stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
  return {t.data_ptr(), 0, stride_of(t, 0), stride_of(t, 1)};
}

flash::RowStats row_stats(const Tensor& t) {  // (batch, heads, seqlen) or (heads, total), contiguous
  FLASH_CHECK_ARG(t.scalar_type() == at::kFloat && t.is_contiguous(), "lse, dlse and delta must be contiguous float32");
  if (t.dim() == 3) return {t.data_ptr<float>(), t.stride(0), t.stride(1)};
  return {t.data_ptr<float>(), 0, t.stride(0)};
}

flash::Bias bias(const Tensor& t) {  // 4-D; size-1 and expanded dimensions get stride 0
  return {t.data_ptr(),    stride_of(t, 0), stride_of(t, 1),
          stride_of(t, 2), stride_of(t, 3), t.scalar_type() == at::kFloat};
}

template <class T>
const T* pointer(const MaybeTensor& t) {
  return t ? static_cast<const T*>(t->data_ptr()) : nullptr;
}

void fill(AttnParams& p, const Tensor& q, const Tensor& k, const Tensor& v, const Options& o) {
  p.q = strided(q);
  p.k = strided(k);
  p.v = strided(v);
  p.dtype = dtype_of(q);
  p.cu_seqlens_q = pointer<int32_t>(o.cu_seqlens_q);
  p.cu_seqlens_k = pointer<int32_t>(o.cu_seqlens_k);
  p.seqused_k = pointer<int32_t>(o.seqused_k);
  p.batch = q.dim() == 4 ? int(q.size(0)) : int(o.cu_seqlens_q->numel()) - 1;
  // A packed sequence has no more rows than exist, whatever its caller says: a model's longest context, or 2^31 - 1.
  p.seqlen_q = int(q.dim() == 4 ? q.size(1) : std::min(o.max_seqlen_q, q.size(0)));
  p.seqlen_k = int(k.dim() == 4 ? k.size(1) : std::min(o.max_seqlen_k, k.size(0)));
  p.total_q = q.dim() == 4 ? q.size(0) * q.size(1) : q.size(0);
  p.total_k = k.dim() == 4 ? k.size(0) * k.size(1) : k.size(0);
  p.num_heads = int(q.size(-2));
  p.num_heads_kv = int(k.size(-2));
  p.head_dim = int(q.size(-1));
  p.head_dim_v = int(v.size(-1));
  p.softmax_scale = float(o.softmax_scale);
  p.window_left = int(o.window_left);
  p.window_right = int(o.window_right);
  p.softcap = float(o.softcap);
  p.alibi_slopes = pointer<float>(o.alibi_slopes);
  p.alibi_batch_stride = o.alibi_slopes && o.alibi_slopes->dim() == 2 ? stride_of(*o.alibi_slopes, 0) : 0;
  if (o.attn_bias) p.bias = bias(*o.attn_bias);
  p.sinks = pointer<float>(o.sinks);
  p.dropout_p = float(o.dropout_p);
  p.rng_state = pointer<int64_t>(o.rng_state);
  p.deterministic = o.deterministic != 0;
  p.device = q.is_cuda() ? q.get_device() : 0;
}

void descale(const MaybeTensor& t, const float*& ptr, int64_t (&strides)[2]) {
  if (!t) return;
  ptr = t->data_ptr<float>();
  strides[0] = stride_of(*t, 0);
  strides[1] = stride_of(*t, 1);
}

FwdParams fwd_params(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, flash::RowStats lse,
                     const Options& o) {
  FwdParams p;
  fill(p, q, k, v, o);
  p.out = strided(out);
  p.lse = lse;
  p.out_dtype = dtype_of(out);
  p.workspace = o.workspace ? o.workspace->data_ptr() : nullptr;
  descale(o.q_descale, p.q_descale, p.q_descale_strides);
  descale(o.k_descale, p.k_descale, p.k_descale_strides);
  descale(o.v_descale, p.v_descale, p.v_descale_strides);
  return p;
}

// grads: dq, dk, dv; dlse and dbias may be missing.
BwdParams bwd_params(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& dout,
                     const Tensor& lse, const MaybeTensor& dlse, const Tensor& delta, const Tensor& dq,
                     const Tensor& dk, const Tensor& dv, const MaybeTensor& dbias, const MaybeTensor& workspace,
                     const Options& o) {
  BwdParams p;
  fill(p, q, k, v, o);
  p.out = strided(out);
  p.dout = strided(dout);
  p.lse = row_stats(lse);
  if (dlse) p.dlse = row_stats(*dlse);
  p.delta = row_stats(delta);
  p.dq = strided(dq);
  p.dk = strided(dk);
  p.dv = strided(dv);
  if (dbias) p.dbias = bias(*dbias);
  p.workspace = workspace ? workspace->data_ptr() : nullptr;
  return p;
}

}  // namespace
