// The forward rows of the portable path, fp32 FMA.
#include "fwd_kernel.cuh"
#include "product_fma.cuh"

namespace flash::simt {

namespace {

template <int kRow>
struct FwdSimt {
  template <bool kCompact>
  using T = Traits<Pass::kFwd, Fma, kInstances[kRow].head_dim, kCompact>;

  static void fwd(const FwdParams& p, Stream stream) {
    const DeviceGuard guard(p.device);
    with_fitting_tile<T<false>, T<true>>(p.device, [&](auto traits) { launch_fwd<decltype(traits)>(p, stream); });
  }
};

constexpr bool belongs(const Key& k) { return k.pass == Pass::kFwd && k.arch == Arch::kSimt; }

const RegisterRows<belongs, FwdSimt> kRegistered;

}  // namespace

}  // namespace flash::simt
