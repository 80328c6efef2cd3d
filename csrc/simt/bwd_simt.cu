// The backward rows of the portable path, fp32 FMA.
#include "bwd_launch.cuh"
#include "product_fma.cuh"

namespace flash::simt {

namespace {

template <int kRow>
struct BwdSimt {
  template <bool kCompact>
  using T = Traits<Pass::kBwd, Fma, kInstances[kRow].head_dim, kCompact>;

  static void bwd(const BwdParams& p, Stream stream) {
    const DeviceGuard guard(p.device);
    with_fitting_tile<T<false>, T<true>>(p.device, [&](auto traits) { launch_bwd<decltype(traits)>(p, stream); });
  }
  static int64_t bwd_workspace(const BwdParams&) { return 0; }
};

constexpr bool belongs(const Key& k) { return k.pass == Pass::kBwd && k.arch == Arch::kSimt; }

const RegisterRows<belongs, BwdSimt> kRegistered;

}  // namespace

}  // namespace flash::simt
