// A call in one step: what Python found out about it once, results and workspace allocated here. Part of binding.cpp.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <utility>

#include "binding_params.h"

namespace {

using Extras = std::array<MaybeTensor, 7>;  // in the order of the Python class

// Tests fill new memory with this, so that what no kernel writes shows.
std::optional<double> poison;

Tensor empty(at::IntArrayRef shape, const at::TensorOptions& options) {
  Tensor t = at::empty(shape, options);
  if (poison) t.fill_(t.scalar_type() == at::kByte ? 255. : *poison);
  return t;
}

Tensor bytes(int64_t size, const Tensor& like) { return empty({size}, like.options().dtype(at::kByte)); }

// out in `dtype`, and lse; not initialised.
std::pair<Tensor, Tensor> empty_results(const Tensor& q, int64_t head_dim_v, at::ScalarType dtype) {
  const auto s = q.sizes();
  const auto results = q.options().dtype(dtype);
  const auto stats = q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  if (q.dim() == 4) return {empty({s[0], s[1], s[2], head_dim_v}, results), empty({s[0], s[2], s[1]}, stats)};
  return {empty({s[0], s[1], head_dim_v}, results), empty({s[1], s[0]}, stats)};
}

bool has_rows(const Tensor& t) { return t.stride(-1) == 1 || t.size(-1) == 1; }

// What the Hopper copy engine takes: base and strides in multiples of 16 bytes, rows that are not one row expanded.
// Strides of size-1 dimensions mean nothing.
bool is_aligned(const Tensor& t) {
  if (t.size(-3) > 1 && t.stride(-3) == 0) return false;
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0) return false;
  for (int64_t dim = 0; dim < t.dim() - 1; dim++)
    if (t.size(dim) > 1 && t.stride(dim) * t.element_size() % 16 != 0) return false;
  return true;
}

flash::Stream current_stream(const Tensor& t) {
  const auto of = [&](const auto& device) -> flash::Stream {
    if constexpr (requires(c10::Stream stream) { device.getStreamNativeHandle(stream); })
      return device.getStreamNativeHandle(device.getStream(t.device()));
    else
      throw std::runtime_error("CUDA tensors need torch 2.11 or newer");
  };
  return of(c10::impl::VirtualGuardImpl(t.device().type()));
}

// Gradients and delta, as a backward pass allocates them.
struct Grads {
  Tensor dq, dk, dv, delta;
};

struct Kernels {
  // Rows of the table; -1 for tensors in host memory.
  int64_t fwd_row = -1, bwd_row = -1, dbias_row = -1;
  Scalars scalars;

  std::pair<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const Extras& extras) const {
    auto [out, lse] = empty_results(q, v.size(-1), q.scalar_type());
    run(q, k, v, with(extras), out, row_stats(lse));
    return {std::move(out), std::move(lse)};
  }

  // Of float8 inputs, with the factors of q, k and v.
  std::pair<Tensor, Tensor> forward8(const Tensor& q, const Tensor& k, const Tensor& v, const Extras& extras,
                                     const std::array<MaybeTensor, 3>& descales, at::ScalarType out_dtype) const {
    auto [out, lse] = empty_results(q, v.size(-1), out_dtype);
    Options o = with(extras);
    o.q_descale = descales[0];
    o.k_descale = descales[1];
    o.v_descale = descales[2];
    run(q, k, v, o, out, row_stats(lse));
    return {std::move(out), std::move(lse)};
  }

  // out alone. The lse, which kernels write all the same, lies behind it in its memory: an allocation less.
  Tensor forward_out(const Tensor& q, const Tensor& k, const Tensor& v, const Extras& extras) const {
    c10::DimVector shape(q.sizes());
    shape.back() = v.size(-1);
    const int64_t rows = q.numel() / q.size(-1), item = q.element_size();
    const int64_t out_bytes = (rows * shape.back() * item + 15) / 16 * 16;
    Tensor out = empty({(out_bytes + rows * int64_t(sizeof(float))) / item}, q.options());
    out.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
    float* lse = reinterpret_cast<float*>(static_cast<char*>(out.data_ptr()) + out_bytes);
    const bool packed = q.dim() == 3;
    run(q, k, v, with(extras), out, {lse, packed ? 0 : rows / q.size(0), packed ? q.size(0) : q.size(1)});
    return out;
  }

  // dout and dlse may be undefined, dbias missing: zeros, to which the gradient of the bias is added, in float32.
  Grads backward(Tensor dout, Tensor dlse, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                 const Tensor& lse, const Extras& extras, const MaybeTensor& dbias) const {
    if (!dout.defined()) dout = at::zeros_like(out);
    if (!has_rows(dout) || (copy_engine() && !is_aligned(dout))) dout = dout.clone(at::MemoryFormat::Contiguous);
    if (dlse.defined()) dlse = dlse.contiguous();
    Grads g{empty(q.sizes(), q.options()), empty(k.sizes(), k.options()), empty(v.sizes(), v.options()),
            empty(lse.sizes(), lse.options())};
    const MaybeTensor maybe_dlse = dlse.defined() ? MaybeTensor(dlse) : std::nullopt;
    BwdParams p = bwd_params(q, k, v, out, dout, lse, maybe_dlse, g.delta, g.dq, g.dk, g.dv,
                             q.is_cpu() ? dbias : std::nullopt, std::nullopt, with(extras));
    if (q.is_cpu()) {
      flash::bwd_cpu(p, at::get_num_threads());
      return g;
    }
    const flash::Bias wanted = dbias ? bias(*dbias) : flash::Bias{};
    p.dbias = wanted;
    const bool is_apart = dbias && !flash::adds_dbias(int(bwd_row), p);
    if (is_apart) p.dbias = {};
    launch_bwd(int(bwd_row), p, q);
    if (is_apart) {
      p.dbias = wanted;
      launch_bwd(int(dbias_row), p, q);
    }
    return g;
  }

 private:
  void run(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options, const Tensor& out,
           flash::RowStats lse) const {
    FwdParams p = fwd_params(q, k, v, out, lse, options);
    if (q.is_cpu()) return flash::fwd_cpu(p, at::get_num_threads());
    Tensor workspace;
    if (const int64_t size = flash::fwd_workspace(int(fwd_row), p)) {
      workspace = bytes(size, q);
      p.workspace = workspace.data_ptr();
    }
    flash::fwd(int(fwd_row), p, current_stream(q));
  }

  bool copy_engine() const { return bwd_row >= 0 && flash::kInstances[bwd_row].arch == flash::Arch::kSm90; }

  Options with(const Extras& extras) const {
    Options o(scalars);
    MaybeTensor* const fields[] = {&o.cu_seqlens_q, &o.cu_seqlens_k, &o.seqused_k, &o.alibi_slopes,
                                   &o.attn_bias,    &o.sinks,        &o.rng_state};
    for (size_t i = 0; i < extras.size(); i++) *fields[i] = extras[i];
    return o;
  }

  static void launch_bwd(int row, BwdParams p, const Tensor& q) {
    Tensor workspace;
    if (const int64_t size = flash::bwd_workspace(row, p)) {
      workspace = bytes(size, q);
      p.workspace = workspace.data_ptr();
    }
    flash::bwd(row, p, current_stream(q));
  }
};

}  // namespace
