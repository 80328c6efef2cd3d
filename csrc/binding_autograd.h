// The autograd node of a call, whose backward pass needs neither Python nor its lock. Part of binding.cpp.
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#include "binding_call.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

constexpr const char* kTwice =
    "attention cannot be differentiated twice: its gradients were made with create_graph=True and then used in a loss";

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
    torch::autograd::DelayedError refuse(kTwice, int64_t(grads.size()));
    return refuse(std::move(grads));
  }
};

}  // namespace
