// The rows for the gradient of the additive bias; every path uses them.
#include "dbias_kernel.cuh"
#include "product_fma.cuh"

namespace flash::simt {

namespace {

template <int kRow>
struct DBiasSimt {
  template <bool kCompact>
  using T = Traits<Pass::kDBias, Fma, kInstances[kRow].head_dim, kCompact>;

  static void bwd(const BwdParams& p, Stream stream) {
    if (p.dbias.ptr == nullptr) return;
    const DeviceGuard guard(p.device);
    with_fitting_tile<T<false>, T<true>>(p.device, [&](auto traits) { launch_dbias<decltype(traits)>(p, stream); });
  }
  static int64_t bwd_workspace(const BwdParams&) { return 0; }
};

constexpr bool belongs(const Key& k) { return k.pass == Pass::kDBias && k.arch == Arch::kSimt; }

const RegisterRows<belongs, DBiasSimt> kRegistered;

}  // namespace

}  // namespace flash::simt
