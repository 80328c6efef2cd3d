// The key under which a call that was checked before is found again. Part of binding.cpp.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <string_view>

#include "binding_params.h"

// Of ATen/autocast_mode.h, which takes as long to compile as the rest of the binding.
namespace at::autocast {
TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace {

// What decides about a call, as bytes, so that one that was checked before is found with one lookup: sizes, strides,
// dtype, device, 16-byte alignment and requires_grad of every tensor (not every input may have a gradient), the numbers
// that are added, and in the last byte whether a gradient is wanted. Empty where torch's dispatcher has to see the
// call: tensor subclasses, modes, transforms, forward-mode differentiation, an autocast that converts.
class Signature {
 public:
  Signature() {
    const auto& thread = c10::impl::tls_local_dispatch_key_set();
    plain_ = (thread.included_ - c10::default_included_set).empty();
    autocast_ = !thread.excluded_.isSupersetOf(c10::autocast_dispatch_keyset);
  }

  // q, k or v. Autocast leaves them alone if they have its dtype already, as in most models.
  void add_main(const Tensor& t) {
    add(t);
    if (!autocast_ || !plain_) return;
    const auto device = t.device().type();
    plain_ = !at::autocast::is_autocast_enabled(device) || at::autocast::get_autocast_dtype(device) == t.scalar_type();
  }

  void add(const Tensor& t) {
    constexpr c10::DispatchKeySet kPlainKeys =
        c10::DispatchKeySet(
            {c10::DispatchKey::Dense, c10::DispatchKey::AutogradFunctionality, c10::DispatchKey::ADInplaceOrView}) |
        c10::DispatchKeySet({c10::BackendComponent::CPUBit, c10::BackendComponent::CUDABit}) |
        c10::autocast_dispatch_keyset;
    const int64_t dim = t.dim();
    plain_ = plain_ && (t.key_set().raw_repr() & ~kPlainKeys.raw_repr()) == 0 && dim <= kMaxDim &&
             !t._fw_grad(0).defined();  // forward-mode differentiation
    if (!plain_) return;
    add(int64_t(t.requires_grad()) << 40 | dim << 32 | int64_t(t.scalar_type()) << 24 | int64_t(t.is_cuda()) << 16 |
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

  void add(int64_t word) { words_[count_++] = word; }

  bool plain() const { return plain_; }
  bool wants_grad() const { return wants_grad_ && c10::GradMode::is_enabled(); }

  std::string_view bytes() {
    if (!plain_) return {};
    const char last = wants_grad();
    std::memcpy(&words_[count_], &last, 1);
    return {reinterpret_cast<const char*>(words_), count_ * sizeof(int64_t) + 1};
  }

 private:
  static constexpr int kMaxDim = 5, kMaxTensors = 9, kMaxNumbers = 16;

  int64_t words_[kMaxTensors * (1 + 2 * kMaxDim) + kMaxNumbers + 1];
  size_t count_ = 0;
  bool plain_, autocast_, wants_grad_ = false;
};

}  // namespace
