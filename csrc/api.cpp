#include "api.h"

#include <dlfcn.h>

#include "check.h"

namespace flash {

namespace {

const char* name(Pass x) { return x == Pass::kFwd ? "fwd" : x == Pass::kBwd ? "bwd" : "dbias"; }
const char* name(Arch x) { return x == Arch::kSimt ? "simt" : x == Arch::kSm80 ? "sm80" : "sm90"; }
const char* name(DType x) {
  return x == DType::kF32 ? "fp32" : x == DType::kF16 ? "fp16" : x == DType::kBF16 ? "bf16" : "e4m3";
}
const char* name(Mask x) {
  return x == Mask::kFull ? "full" : x == Mask::kCausal ? "causal" : x == Mask::kLocal ? "local" : "any_mask";
}
const char* name(Layout x) { return x == Layout::kDense ? "dense" : x == Layout::kPacked ? "packed" : "any_layout"; }
const char* name(Variant x) {
  return x == Variant::kPlain ? "plain" : x == Variant::kGeneral ? "general" : "any_variant";
}

std::string table_of(const Key& call) {
  std::string text;
  for (const Key& row : kInstances)
    if (row.pass == call.pass && row.arch == call.arch) text += "\n  " + to_string(row);
  return text.empty() ? "\n  (none)" : text;
}

// Sinks are a matter of the forward's last step, which the Hopper kernels for 16 bit do in every variant; backwards
// know them through lse.
bool needs_general(Pass pass, Arch arch, const AttnParams& p) {
  const bool always_takes_sinks = pass != Pass::kFwd || (arch == Arch::kSm90 && p.dtype != DType::kE4M3);
  return p.changes_scores() || (p.sinks != nullptr && !always_takes_sinks);
}

const Launchers& row_for(int row, bool forward, const AttnParams& params) {
  FLASH_CHECK_ARG(row >= 0 && row < kNumInstances, "row ", row, " is not in the table of ", kNumInstances);
  const Key& key = kInstances[row];
  FLASH_CHECK_ARG(forward == (key.pass == Pass::kFwd), "kernel '", to_string(key), "' is no ",
                  forward ? "forward" : "backward");
  check_params(params);
  const Key call = key_of(key.pass, key.arch, params);
  FLASH_CHECK_ARG(serves(key, call), "kernel '", to_string(key), "' does not serve '", to_string(call),
                  "'; the table has:", table_of(call));
  FLASH_CHECK_ARG(is_built(row), "kernel '", to_string(key), "' is not in this build");
  return launchers(row);
}

}  // namespace

std::string to_string(const Key& key) {
  std::string dims = std::to_string(key.head_dim);
  if (key.head_dim_v != key.head_dim) dims += "/" + std::to_string(key.head_dim_v);
  return message(name(key.pass), " ", name(key.arch), " ", name(key.dtype), " ", dims, " ", name(key.mask), " ",
                 name(key.layout), " ", name(key.variant));
}

void check_params(const AttnParams& p) {
  FLASH_CHECK_ARG(p.batch >= 0 && p.seqlen_q >= 0 && p.seqlen_k >= 0,
                  "batch, seqlen_q and seqlen_k must not be negative, got ", p.batch, ", ", p.seqlen_q, ", ",
                  p.seqlen_k);
  FLASH_CHECK_ARG(p.head_dim >= 1 && p.head_dim_v >= 1, "head_dim and head_dim_v must be at least 1, got ", p.head_dim,
                  " and ", p.head_dim_v);
  FLASH_CHECK_ARG(p.num_heads >= 0 && p.num_heads_kv >= 1 && p.num_heads % p.num_heads_kv == 0,
                  "num_heads must be a multiple of num_heads_kv, got ", p.num_heads, " and ", p.num_heads_kv);
  FLASH_CHECK_ARG(p.window_left >= -1 && p.window_right >= -1, "window_size must be -1 or more, got (", p.window_left,
                  ", ", p.window_right, ")");
  FLASH_CHECK_ARG(p.dropout_p >= 0.f && p.dropout_p < 1.f, "dropout_p must be in [0, 1), got ", p.dropout_p);
  FLASH_CHECK_ARG(p.dropout_p == 0.f || p.rng_state != nullptr,
                  "rng_state must be given with a dropout_p, got nullptr and ", p.dropout_p);
}

Key key_of(Pass pass, Arch arch, const AttnParams& p) {
  const Mask mask = p.window_left < 0 && p.window_right < 0    ? Mask::kFull
                    : p.window_left < 0 && p.window_right == 0 ? Mask::kCausal
                                                               : Mask::kLocal;
  return {pass,
          arch,
          p.dtype,
          p.head_dim,
          p.head_dim_v,
          mask,
          p.packed() ? Layout::kPacked : Layout::kDense,
          needs_general(pass, arch, p) ? Variant::kGeneral : Variant::kPlain};
}

int find_row(const Key& call) {
  for (int row = 0; row < kNumInstances; row++)
    if (serves(kInstances[row], call) && is_built(row)) return row;
  return -1;
}

void fwd(int row, const FwdParams& params, Stream stream) { row_for(row, true, params).fwd(params, stream); }

int64_t fwd_workspace(int row, const FwdParams& params) {
  const auto bytes = row_for(row, true, params).fwd_workspace;
  return bytes == nullptr ? 0 : bytes(params);
}

void bwd(int row, const BwdParams& params, Stream stream) { row_for(row, false, params).bwd(params, stream); }

int64_t bwd_workspace(int row, const BwdParams& params) { return row_for(row, false, params).bwd_workspace(params); }

bool adds_dbias(int row, const BwdParams& params) {
  const auto adds = row_for(row, false, params).adds_dbias;
  return adds != nullptr && adds(params);
}

void override_row(int row, const std::string& path) {
  FLASH_CHECK_ARG(row >= 0 && row < kNumInstances, "row ", row, " is not in the table of ", kNumInstances);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  FLASH_CHECK_ARG(library != nullptr, "cannot load ", path, ": ", dlerror());
  // csrc/variant.cpp exports it: the launchers of the library's own copy of the table.
  const auto get = reinterpret_cast<Launchers* (*)(int)>(dlsym(library, "flash_variant_launchers"));
  FLASH_CHECK_ARG(get != nullptr, path, " has no flash_variant_launchers");
  launchers(row) = *get(row);
}

}  // namespace flash
