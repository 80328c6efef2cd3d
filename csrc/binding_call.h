// A call in one step: what Python found out about it once, results and workspace allocated here, and a backward pass
// that needs neither Python nor its lock. Part of binding.cpp.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "binding_params.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Extras = std::array<MaybeTensor, 7>;  // in the order of the Python class

// Tests fill new memory with this, so that what no kernel writes shows.
std::optional<double> poison;

Tensor empty(at::IntArrayRef shape, const at::TensorOptions& options) {
  Tensor t = at::empty(shape, options);
  if (poison) t.fill_(t.scalar_type() == at::kByte ? 255. : *poison);
  return t;
}

Tensor bytes(int64_t size, const Tensor& like) { return empty({size}, like.options().dtype(at::kByte)); }

// out and lse, not initialised.
std::pair<Tensor, Tensor> empty_results(const Tensor& q, int64_t head_dim_v) {
  const auto s = q.sizes();
  const auto stats = q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  if (q.dim() == 4) return {empty({s[0], s[1], s[2], head_dim_v}, q.options()), empty({s[0], s[2], s[1]}, stats)};
  return {empty({s[0], s[1], head_dim_v}, q.options()), empty({s[1], s[0]}, stats)};
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
    auto [out, lse] = empty_results(q, v.size(-1));
    run(q, k, v, extras, out, row_stats(lse));
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
    run(q, k, v, extras, out, {lse, packed ? 0 : rows / q.size(0), packed ? q.size(0) : q.size(1)});
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
    launch_bwd(int(bwd_row), p, q);
    if (dbias) {
      p.dbias = bias(*dbias);
      launch_bwd(int(dbias_row), p, q);
    }
    return g;
  }

 private:
  void run(const Tensor& q, const Tensor& k, const Tensor& v, const Extras& extras, const Tensor& out,
           flash::RowStats lse) const {
    FwdParams p = fwd_params(q, k, v, out, lse, with(extras));
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

// As a tensor: of what an autograd node may keep, compiled autograd can compare and hand on numbers and tensors alone,
// and a tensor is made once for all calls of a kind.
static_assert(std::is_trivially_copyable_v<Kernels>);
Tensor as_tensor(const Kernels& kernels) {
  Tensor t = at::empty({int64_t(sizeof(Kernels))}, at::kByte);
  std::memcpy(t.data_ptr(), &kernels, sizeof(Kernels));
  return t;
}

Kernels from_tensor(const Tensor& t) {
  Kernels kernels;
  std::memcpy(static_cast<void*>(&kernels), t.const_data_ptr(), sizeof(Kernels));
  return kernels;
}

// A new autograd node, as this version of torch holds nodes: by std::shared_ptr, from 2.14 on by c10::intrusive_ptr.
template <class Node, class Held = decltype(torch::autograd::Edge::function)>
auto new_node() {
  if constexpr (std::is_constructible_v<Held, std::shared_ptr<Node>>)
    return std::shared_ptr<Node>(new Node(), [](Node* node) { deleteNode(node); });
  else
    return c10::make_intrusive<Node>();
}

// The backward pass of a call whose extras take no gradients.
class Attention : public torch::autograd::Function<Attention> {
 public:
  // `kept`: the kernels as_tensor. What Function::apply does, for three inputs and two new results, at a third of its
  // time: it looks each tensor up among the others, and notes shapes for gradients that nobody fills with zeros.
  static std::pair<Tensor, Tensor> apply(const Kernels& kernels, const Tensor& kept, const Tensor& q, const Tensor& k,
                                         const Tensor& v, const Extras& extras) {
    auto [out, lse] = kernels.forward(q, k, v, extras);
    const auto node = new_node<torch::autograd::CppNode<Attention>>();
    node->is_variable_input_ = {true, true, true};
    node->set_ctx_grad_fn(node);
    node->set_next_edges(torch::autograd::collect_next_edges(q, k, v));
    torch::autograd::set_history(out, node);
    torch::autograd::set_history(lse, node);

    AutogradContext& ctx = node->ctx_;
    variable_list saved{q, k, v, out, lse};
    if (std::any_of(extras.begin(), extras.end(), [](const MaybeTensor& t) { return t.has_value(); }))
      for (const MaybeTensor& t : extras) saved.push_back(t.value_or(Tensor()));
    ctx.save_for_backward(std::move(saved));
    ctx.saved_data["kernels"] = kept;
    ctx.set_materialize_grads(false);
    node->save_variables_to_ctx();
    return {std::move(out), std::move(lse)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(3);  // of q, k and v
    if (!grads[0].defined() && !grads[1].defined()) return results;
    const variable_list saved = ctx->get_saved_variables();
    const Kernels kernels = from_tensor(ctx->saved_data["kernels"].toTensor());
    Extras extras;
    for (size_t i = 5; i < saved.size(); i++)
      if (saved[i].defined()) extras[i - 5] = saved[i];
    const bool twice = c10::GradMode::is_enabled();
    {
      const c10::AutoGradMode no_grad(false);
      const Grads g =
          kernels.backward(grads[0], grads[1], saved[0], saved[1], saved[2], saved[3], saved[4], extras, std::nullopt);
      const Tensor all[] = {g.dq, g.dk, g.dv};
      for (int i = 0; i < 3; i++)
        if (ctx->needs_input_grad(i)) results[i] = all[i];
    }
    return twice ? once_only(std::move(results)) : results;
  }

 private:
  // The same gradients, of which no further gradient can be taken: an error instead of silent zeros.
  static variable_list once_only(variable_list grads) {
    for (Tensor& g : grads)
      if (g.defined()) g.requires_grad_();
    torch::autograd::DelayedError refuse(
        "attention cannot be differentiated twice: its gradients were made with create_graph=True and then used in a "
        "loss",
        int64_t(grads.size()));
    return refuse(std::move(grads));
  }
};

}  // namespace
