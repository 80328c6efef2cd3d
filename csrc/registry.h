// Row of the table -> the functions that run it. Each kernel file registers its rows when the library is loaded.
#pragma once

#include <cstddef>
#include <utility>

#include "instances.h"

namespace flash {

// A CUDA stream, as a plain pointer so that no CUDA header is needed here.
using Stream = void*;

struct Launchers {
  void (*fwd)(const FwdParams&, Stream) = nullptr;
  int64_t (*fwd_workspace)(const FwdParams&) = nullptr;  // bytes; nullptr: none
  void (*bwd)(const BwdParams&, Stream) = nullptr;
  int64_t (*bwd_workspace)(const BwdParams&) = nullptr;  // bytes
  bool (*adds_dbias)(const BwdParams&) = nullptr;        // whether bwd computes params.dbias too; nullptr: it does not
};

// The functions of one row; empty where the row was not built.
inline Launchers& launchers(int row) {
  static Launchers table[kNumInstances];
  return table[row];
}

inline bool is_built(int row) {
  const Launchers& l = launchers(row);
  return l.fwd != nullptr || l.bwd != nullptr;
}

// Registers every row of this build for which `kBelongs(key)` holds. `Kernel<row>` has static functions named like the
// members of Launchers: a forward has `fwd` and, where it needs one, `fwd_workspace`; a backward has `bwd`,
// `bwd_workspace` and maybe `adds_dbias`. Or it has `add()`, for parts of a row that only the row's other files call.
// Use as a namespace-scope constant:
//   constexpr bool belongs(const Key& k) { return k.pass == Pass::kFwd && k.arch == Arch::kSimt; }
//   const RegisterRows<belongs, FwdSimt> kRegistered;
// (A named function: nvcc refuses a lambda as a template argument.)
template <auto kBelongs, template <int> class Kernel>
struct RegisterRows {
  RegisterRows() { add_all(std::make_index_sequence<kNumInstances>{}); }

 private:
  template <size_t... kRows>
  static void add_all(std::index_sequence<kRows...>) {
    (add<int(kRows)>(), ...);
  }

  template <int kRow>
  static void add() {
    if constexpr (in_this_build(kRow) && kBelongs(kInstances[kRow])) {
      if constexpr (requires { Kernel<kRow>::add(); }) {
        Kernel<kRow>::add();
      } else if constexpr (kInstances[kRow].pass == Pass::kFwd) {
        launchers(kRow).fwd = &Kernel<kRow>::fwd;
        if constexpr (requires { &Kernel<kRow>::fwd_workspace; })
          launchers(kRow).fwd_workspace = &Kernel<kRow>::fwd_workspace;
      } else {
        launchers(kRow).bwd = &Kernel<kRow>::bwd;
        launchers(kRow).bwd_workspace = &Kernel<kRow>::bwd_workspace;
        if constexpr (requires { &Kernel<kRow>::adds_dbias; }) launchers(kRow).adds_dbias = &Kernel<kRow>::adds_dbias;
      }
    }
  }
};

}  // namespace flash
