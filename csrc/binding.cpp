// What Python sees. With its headers the only translation unit that knows torch. Python checks the arguments.
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding_autograd.h"
#include "binding_call.h"
#include "binding_eager.h"
#include "binding_params.h"
#include "binding_signature.h"

namespace {

flash::Stream as_stream(int64_t stream) { return reinterpret_cast<flash::Stream>(stream); }

// (pass, arch, dtype, head_dim, head_dim_v, mask, layout, variant): the enumerators' numbers.
using KeyTuple = std::tuple<int, int, int, int, int, int, int, int>;

KeyTuple as_tuple(const flash::Key& k) {
  return {int(k.pass), int(k.arch), int(k.dtype), k.head_dim, k.head_dim_v, int(k.mask), int(k.layout), int(k.variant)};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  py::class_<Scalars>(m, "Scalars")
      .def(py::init<>())
      .def_readwrite("max_seqlen_q", &Scalars::max_seqlen_q)
      .def_readwrite("max_seqlen_k", &Scalars::max_seqlen_k)
      .def_readwrite("softmax_scale", &Scalars::softmax_scale)
      .def_readwrite("window_left", &Scalars::window_left)
      .def_readwrite("window_right", &Scalars::window_right)
      .def_readwrite("softcap", &Scalars::softcap)
      .def_readwrite("dropout_p", &Scalars::dropout_p)
      .def_readwrite("deterministic", &Scalars::deterministic);
  py::class_<Options, Scalars>(m, "Options")
      .def(py::init<>())
      .def(py::init<const Scalars&>())
      .def_readwrite("cu_seqlens_q", &Options::cu_seqlens_q)
      .def_readwrite("cu_seqlens_k", &Options::cu_seqlens_k)
      .def_readwrite("seqused_k", &Options::seqused_k)
      .def_readwrite("alibi_slopes", &Options::alibi_slopes)
      .def_readwrite("attn_bias", &Options::attn_bias)
      .def_readwrite("sinks", &Options::sinks)
      .def_readwrite("rng_state", &Options::rng_state)
      .def_readwrite("q_descale", &Options::q_descale)
      .def_readwrite("k_descale", &Options::k_descale)
      .def_readwrite("v_descale", &Options::v_descale)
      .def_readwrite("workspace", &Options::workspace);

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
    for (const Tensor* t : {&q, &k, &v}) s.add_main(*t);
    for (const MaybeTensor* t : {&cu_seqlens_q, &cu_seqlens_k, &seqused_k, &alibi_slopes, &attn_bias, &sinks})
      s.add(*t);
    return pybind11::bytes(s.bytes());
  });

  py::class_<Kernels>(m, "Kernels")
      .def(py::init<>())
      .def_readwrite("fwd_row", &Kernels::fwd_row)
      .def_readwrite("bwd_row", &Kernels::bwd_row)
      .def_readwrite("dbias_row", &Kernels::dbias_row)
      .def_readwrite("scalars", &Kernels::scalars)
      .def("forward",
           [](const Kernels& kernels, const Tensor& q, const Tensor& k, const Tensor& v, const Extras& extras) {
             return unlocked(q, [&] { return kernels.forward(q, k, v, extras); });
           })
      .def("forward8", &Kernels::forward8)
      .def("attend",
           [](const Kernels& kernels, const Tensor& q, const Tensor& k, const Tensor& v, const Extras& extras) {
             return unlocked(q, [&] { return Attention::apply(kernels, as_tensor(kernels), q, k, v, extras); });
           })
      .def("backward", [](const Kernels& kernels, const MaybeTensor& dout, const MaybeTensor& dlse, const Tensor& q,
                          const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse, const Extras& extras,
                          const MaybeTensor& dbias) {
        const Grads g = unlocked(q, [&] {
          return kernels.backward(dout.value_or(Tensor()), dlse.value_or(Tensor()), q, k, v, out, lse, extras, dbias);
        });
        return std::tuple(g.dq, g.dk, g.dv, g.delta);
      });
  m.add_object("eager", py::reinterpret_steal<py::object>(PyCFunction_NewEx(&eager_method, nullptr, nullptr)));
  m.attr("TWICE") = kTwice;
  m.def("remember", &remember);
  m.def("forget", [] { return std::exchange(known_calls, {}).size(); });
  m.def("empty_results", &empty_results);
  m.def("poison", [](std::optional<double> value) { poison = value; });
  m.def("has_rows", &has_rows);
  m.def("is_aligned", &is_aligned);

  m.def("fwd", [](int row, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                  const Options& o,
                  int64_t stream) { flash::fwd(row, fwd_params(q, k, v, out, row_stats(lse), o), as_stream(stream)); });
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
}
