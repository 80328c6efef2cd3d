// The torch-free C++ interface.
#pragma once

#include <string>

#include "instances.h"
#include "registry.h"

namespace flash {

// The first row of the table that serves `call` and is built; -1 if none is. Rows of a family are ordered by head_dim.
int find_row(const Key& call);

// "fwd sm90 bf16 128 causal dense plain"
std::string to_string(const Key& key);

// Throws std::invalid_argument where sizes and numbers of a call make no sense. Whatever runs one below does so first.
void check_params(const AttnParams& params);

// What a call asks of the table on this architecture.
Key key_of(Pass pass, Arch arch, const AttnParams& params);

// Run one row on a CUDA stream. Throws std::invalid_argument where the row does not serve the call or is not built, and
// std::runtime_error where CUDA reports an error. Asynchronous; the current device is unchanged afterwards.
void fwd(int row, const FwdParams& params, Stream stream);
int64_t fwd_workspace(int row, const FwdParams& params);  // bytes for params.workspace; 0 for most rows
void bwd(int row, const BwdParams& params, Stream stream);
int64_t bwd_workspace(int row, const BwdParams& params);
// Whether bwd of this row adds to params.dbias itself. Otherwise a row of Pass::kDBias does it, after bwd.
bool adds_dbias(int row, const BwdParams& params);

// The CPU path, on host memory; `threads` workers.
void fwd_cpu(const FwdParams& params, int threads);
void bwd_cpu(const BwdParams& params, int threads);

// Put the forward or backward of the shared library at `path` in place of the row's own: one row, compiled on first use
// by the JIT or with other tile numbers by bench.tune (variant.cpp).
void override_row(int row, const std::string& path);

}  // namespace flash
