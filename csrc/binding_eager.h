// An eager call in one step from Python: found among the calls that were checked before, and run. Part of binding.cpp.
#pragma once

#include <ATen/Context.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <functional>
#include <string>
#include <unordered_map>

#include "binding_autograd.h"
#include "binding_call.h"
#include "binding_signature.h"

namespace {

// Runs `call` without Python's lock where it computes on the CPU; a launch is too short to be worth it.
template <class Call>
auto unlocked(const Tensor& q, const Call& call) {
  std::optional<pybind11::gil_scoped_release> release;
  if (q.is_cpu()) release.emplace();
  return call();
}

// A call as the user wrote it, and its key, which is empty where an argument is not of its usual type: Python's checks
// then convert it, or say what is wrong. Borrows q, k and v.
class EagerCall {
 public:
  // `call`: a tuple in the order of flash_ext.call.Arguments.
  EagerCall(PyObject* call, PyObject* path) {
    FLASH_CHECK_ARG(PyTuple_Check(call) && PyTuple_GET_SIZE(call) == 17, "a call is a tuple of 17 arguments");
    int next = 0;
    const auto item = [&] { return PyTuple_GET_ITEM(call, next++); };
    for (const Tensor*& t : main_) add_main(t, item());
    for (int i = 0; i < 6; i++) add_extra(extras_[i], item());
    usual_ = usual_ && key_.plain();  // else symbolic lengths may follow, which nobody may look into
    add_integer(item());              // causal
    add_scale(item());
    add_window(item());
    add_real(item());     // softcap
    add_real(item());     // dropout_p
    add_integer(item());  // deterministic
    add_integer(item());  // max_seqlen_q
    add_integer(item());  // max_seqlen_k
    key_.add(int64_t(at::globalContext().deterministicAlgorithms()));
    add_text(path);
  }

  std::string_view key() { return usual_ ? key_.bytes() : std::string_view(); }
  bool wants_grad() const { return key_.wants_grad(); }
  const Tensor& q() const { return *main_[0]; }
  const Tensor& k() const { return *main_[1]; }
  const Tensor& v() const { return *main_[2]; }
  const Extras& extras() const { return extras_; }

 private:
  void add_main(const Tensor*& t, PyObject* given) {
    usual_ = usual_ && THPVariable_Check(given);
    if (!usual_) return;
    t = &THPVariable_Unpack(given);
    key_.add_main(*t);
  }

  void add_extra(MaybeTensor& t, PyObject* given) {
    usual_ = usual_ && (given == Py_None || THPVariable_Check(given));
    if (!usual_) return;
    if (given != Py_None) t = THPVariable_Unpack(given);
    key_.add(t);
  }

  // bool and numpy's integers too; not a tensor, whose value the host would have to wait for.
  void add_integer(PyObject* x) {
    usual_ = usual_ && PyIndex_Check(x) && !THPVariable_Check(x);
    if (!usual_) return;
    key_.add(int64_t(PyNumber_AsSsize_t(x, nullptr)));  // what does not fit is cut off: such numbers are all the same
    usual_ = PyErr_Occurred() == nullptr;
    PyErr_Clear();
  }

  void add_real(PyObject* x) {
    usual_ = usual_ && (PyFloat_Check(x) || PyLong_Check(x));
    if (!usual_) return;
    const double value = PyFloat_AsDouble(x);
    int64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    key_.add(bits);
    usual_ = PyErr_Occurred() == nullptr;
    PyErr_Clear();
  }

  void add_scale(PyObject* x) {
    key_.add(int64_t(x == Py_None));
    if (x != Py_None) add_real(x);
  }

  void add_window(PyObject* x) {
    usual_ = usual_ && (PyTuple_CheckExact(x) || PyList_CheckExact(x)) && PySequence_Fast_GET_SIZE(x) == 2;
    if (!usual_) return;
    for (int i = 0; i < 2; i++) add_integer(PySequence_Fast_GET_ITEM(x, i));
  }

  // The names of the paths differ in their first eight bytes.
  void add_text(PyObject* x) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(x, &size);
    FLASH_CHECK_ARG(text != nullptr, "path must be a string");
    int64_t word = 0;
    std::memcpy(&word, text, size_t(std::min<Py_ssize_t>(size, sizeof word)));
    key_.add(word);
  }

  bool usual_ = true;
  const Tensor* main_[3] = {};
  Extras extras_;
  Signature key_;
};

struct KnownCall {
  Kernels kernels;
  Tensor kept;  // kernels, as their autograd node keeps them
};

struct HashBytes {
  using is_transparent = void;  // no string is made to look one up
  size_t operator()(std::string_view bytes) const { return std::hash<std::string_view>{}(bytes); }
};

// Calls that were checked, and that need nothing but kernels and their extras as they are. Guarded by Python's lock.
std::unordered_map<std::string, KnownCall, HashBytes, std::equal_to<>> known_calls;

void remember(const std::string& key, const Kernels& kernels) {
  if (known_calls.size() >= 4096) known_calls.clear();  // ever new lengths must not grow it without bound
  known_calls.insert_or_assign(key, KnownCall{kernels, as_tensor(kernels)});
}

PyObject* run_eagerly(PyObject* call, PyObject* return_lse, PyObject* path) {
  EagerCall c(call, path);
  const std::string_view key = c.key();
  const auto entry = known_calls.find(key);
  if (entry == known_calls.end()) return PyBytes_FromStringAndSize(key.data(), Py_ssize_t(key.size()));
  const KnownCall known = entry->second;  // a copy: another thread may have it forgotten meanwhile
  const int wants_lse = PyObject_IsTrue(return_lse);
  if (wants_lse < 0) return nullptr;  // Python's error is set
  if (!wants_lse && !c.wants_grad())
    return THPVariable_Wrap(
        unlocked(c.q(), [&] { return known.kernels.forward_out(c.q(), c.k(), c.v(), c.extras()); }));
  auto [out, lse] = unlocked(c.q(), [&] {
    return c.wants_grad() ? Attention::apply(known.kernels, known.kept, c.q(), c.k(), c.v(), c.extras())
                          : known.kernels.forward(c.q(), c.k(), c.v(), c.extras());
  });
  if (!wants_lse) return THPVariable_Wrap(std::move(out));
  return pybind11::make_tuple(std::move(out), std::move(lse)).release().ptr();
}

// _C.eager(call, return_lse, path) -> out, or (out, lse); of a call that is not known its key, as bytes. By Python's
// own protocol, which takes a tenth of pybind11's time.
PyObject* eager(PyObject*, PyObject* const* args, Py_ssize_t count) {
  try {
    FLASH_CHECK_ARG(count == 3, "eager takes 3 arguments, got ", count);
    return run_eagerly(args[0], args[1], args[2]);
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

PyMethodDef eager_method = {"eager", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&eager)), METH_FASTCALL,
                            nullptr};

}  // namespace
