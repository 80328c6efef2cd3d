// Python binding: at::Tensor -> params. The only file that knows torch. Python checks the arguments and allocates
// outputs.
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "api.h"
#include "check.h"

namespace {

using flash::AttnParams;
using flash::BwdParams;
using flash::FwdParams;
using Tensor = at::Tensor;
using MaybeTensor = std::optional<at::Tensor>;

// Everything of a call but q, k, v and its results. Python keeps those that hold no tensors for the next call.
struct Options {
  MaybeTensor cu_seqlens_q, cu_seqlens_k;  // (batch + 1) int32
  MaybeTensor seqused_k;                   // (batch) int32
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  double softmax_scale = 1.;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0.;
  MaybeTensor alibi_slopes;  // (num_heads) or (batch, num_heads) fp32
  MaybeTensor attn_bias;     // expanded to (batch, num_heads, seqlen_q, seqlen_k), fp32 or q's dtype
  MaybeTensor sinks;         // (num_heads) fp32
  double dropout_p = 0.;
  MaybeTensor rng_state;                        // (2) int64
  MaybeTensor q_descale, k_descale, v_descale;  // expanded to (batch, num_heads_kv) fp32
  MaybeTensor workspace;                        // of a forward, as many bytes as fwd_workspace says
  bool deterministic = false;
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
  throw std::invalid_argument("dtype must be float32, float16, bfloat16 or float8_e4m3fn");
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
  p.seqlen_q = q.dim() == 4 ? int(q.size(1)) : int(o.max_seqlen_q);
  p.seqlen_k = k.dim() == 4 ? int(k.size(1)) : int(o.max_seqlen_k);
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
  p.deterministic = o.deterministic;
  p.device = q.is_cuda() ? q.get_device() : 0;
}

void descale(const MaybeTensor& t, const float*& ptr, int64_t (&strides)[2]) {
  if (!t) return;
  ptr = t->data_ptr<float>();
  strides[0] = stride_of(*t, 0);
  strides[1] = stride_of(*t, 1);
}

// What decides about a call besides its scalars, as bytes, so that Python finds a call that it has checked before with
// one dictionary lookup: sizes, strides, dtype, device and 16-byte alignment of every tensor, and in the last byte
// whether a gradient is wanted. Empty where torch's dispatcher has to see the call: tensor subclasses, modes,
// transforms, autocast.
class Signature {
 public:
  Signature() {
    const auto& thread = c10::impl::tls_local_dispatch_key_set();
    plain_ = (thread.included_ - c10::default_included_set).empty() &&
             thread.excluded_.isSupersetOf(c10::autocast_dispatch_keyset);
  }

  void add(const Tensor& t) {
    constexpr c10::DispatchKeySet kPlainKeys =
        c10::DispatchKeySet(
            {c10::DispatchKey::Dense, c10::DispatchKey::AutogradFunctionality, c10::DispatchKey::ADInplaceOrView}) |
        c10::DispatchKeySet({c10::BackendComponent::CPUBit, c10::BackendComponent::CUDABit}) |
        c10::autocast_dispatch_keyset;
    const int64_t dim = t.dim();
    plain_ = plain_ && (t.key_set().raw_repr() & ~kPlainKeys.raw_repr()) == 0 && dim <= kMaxDim;
    if (!plain_) return;
    add(dim << 32 | int64_t(t.scalar_type()) << 24 | int64_t(t.is_cuda()) << 16 |
        int64_t(uint8_t(t.get_device())) << 8 | int64_t(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16));
    for (const int64_t size : t.sizes()) add(size);
    for (const int64_t stride : t.strides()) add(stride);
    wants_grad_ = wants_grad_ || t.requires_grad();
  }

  void add(const MaybeTensor& t) {
    if (t)
      add(*t);
    else
      add(int64_t(-1));
  }

  pybind11::bytes bytes() {
    if (!plain_) return {};
    const char last = wants_grad_ && c10::GradMode::is_enabled();
    std::memcpy(&words_[count_], &last, 1);
    return {reinterpret_cast<const char*>(words_), count_ * sizeof(int64_t) + 1};
  }

 private:
  static constexpr int kMaxDim = 5, kMaxTensors = 9;

  void add(int64_t word) { words_[count_++] = word; }

  int64_t words_[kMaxTensors * (1 + 2 * kMaxDim) + 1];
  size_t count_ = 0;
  bool plain_, wants_grad_ = false;
};

// out and lse, not initialised. The one allocation that is not Python's: two calls of torch.empty take as long as a
// launch.
std::pair<Tensor, Tensor> empty_results(const Tensor& q, int64_t head_dim_v) {
  const auto s = q.sizes();
  const auto stats = q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  if (q.dim() == 4)
    return {at::empty({s[0], s[1], s[2], head_dim_v}, q.options()), at::empty({s[0], s[2], s[1]}, stats)};
  return {at::empty({s[0], s[1], head_dim_v}, q.options()), at::empty({s[1], s[0]}, stats)};
}

flash::Stream as_stream(int64_t stream) { return reinterpret_cast<flash::Stream>(stream); }

FwdParams fwd_params(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                     const Options& o) {
  FwdParams p;
  fill(p, q, k, v, o);
  p.out = strided(out);
  p.lse = row_stats(lse);
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

// (pass, arch, dtype, head_dim, head_dim_v, mask, layout, variant): the enumerators' numbers.
using KeyTuple = std::tuple<int, int, int, int, int, int, int, int>;

KeyTuple as_tuple(const flash::Key& k) {
  return {int(k.pass), int(k.arch), int(k.dtype), k.head_dim, k.head_dim_v, int(k.mask), int(k.layout), int(k.variant)};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  py::class_<Options>(m, "Options")
      .def(py::init<>())
      .def_readwrite("cu_seqlens_q", &Options::cu_seqlens_q)
      .def_readwrite("cu_seqlens_k", &Options::cu_seqlens_k)
      .def_readwrite("seqused_k", &Options::seqused_k)
      .def_readwrite("max_seqlen_q", &Options::max_seqlen_q)
      .def_readwrite("max_seqlen_k", &Options::max_seqlen_k)
      .def_readwrite("softmax_scale", &Options::softmax_scale)
      .def_readwrite("window_left", &Options::window_left)
      .def_readwrite("window_right", &Options::window_right)
      .def_readwrite("softcap", &Options::softcap)
      .def_readwrite("alibi_slopes", &Options::alibi_slopes)
      .def_readwrite("attn_bias", &Options::attn_bias)
      .def_readwrite("sinks", &Options::sinks)
      .def_readwrite("dropout_p", &Options::dropout_p)
      .def_readwrite("rng_state", &Options::rng_state)
      .def_readwrite("q_descale", &Options::q_descale)
      .def_readwrite("k_descale", &Options::k_descale)
      .def_readwrite("v_descale", &Options::v_descale)
      .def_readwrite("workspace", &Options::workspace)
      .def_readwrite("deterministic", &Options::deterministic);

  m.def("instances", [] {  // the whole table, in order
    std::vector<KeyTuple> rows;
    for (const flash::Key& key : flash::kInstances) rows.push_back(as_tuple(key));
    return rows;
  });
  m.def("row_name", [](int row) { return flash::to_string(flash::kInstances.at(row)); });
  m.def("is_built", [](int row) { return flash::is_built(row); });
  m.def("override_row", &flash::override_row);

  m.def("signature", [](const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens_q,
                        const MaybeTensor& cu_seqlens_k, const MaybeTensor& seqused_k, const MaybeTensor& alibi_slopes,
                        const MaybeTensor& attn_bias, const MaybeTensor& sinks) {
    Signature s;
    for (const Tensor* t : {&q, &k, &v}) s.add(*t);
    for (const MaybeTensor* t : {&cu_seqlens_q, &cu_seqlens_k, &seqused_k, &alibi_slopes, &attn_bias, &sinks})
      s.add(*t);
    return s.bytes();
  });

  m.def("empty_results", &empty_results);

  m.def("fwd",
        [](int row, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
           const Options& o, int64_t stream) { flash::fwd(row, fwd_params(q, k, v, out, lse, o), as_stream(stream)); });
  m.def("bwd",
        [](int row, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& dout,
           const Tensor& lse, const MaybeTensor& dlse, const Tensor& delta, const Tensor& dq, const Tensor& dk,
           const Tensor& dv, const MaybeTensor& dbias, const MaybeTensor& workspace, const Options& o, int64_t stream) {
          flash::bwd(row, bwd_params(q, k, v, out, dout, lse, dlse, delta, dq, dk, dv, dbias, workspace, o),
                     as_stream(stream));
        });
  m.def("fwd_workspace", [](int row, const Tensor& q, const Tensor& k, const Tensor& v, const Options& o) {
    FwdParams p;
    fill(p, q, k, v, o);
    return flash::fwd_workspace(row, p);
  });
  m.def("bwd_workspace", [](int row, const Tensor& q, const Tensor& k, const Tensor& v, const Options& o) {
    BwdParams p;
    fill(p, q, k, v, o);
    return flash::bwd_workspace(row, p);
  });
  m.def("fwd_cpu", [](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                      const Options& o, int threads) {
    const FwdParams p = fwd_params(q, k, v, out, lse, o);
    py::gil_scoped_release release;
    flash::fwd_cpu(p, threads);
  });
  m.def("bwd_cpu", [](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& dout,
                      const Tensor& lse, const MaybeTensor& dlse, const Tensor& delta, const Tensor& dq,
                      const Tensor& dk, const Tensor& dv, const MaybeTensor& dbias, const Options& o, int threads) {
    const BwdParams p = bwd_params(q, k, v, out, dout, lse, dlse, delta, dq, dk, dv, dbias, std::nullopt, o);
    py::gil_scoped_release release;
    flash::bwd_cpu(p, threads);
  });
}
