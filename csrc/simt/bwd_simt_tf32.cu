// The fp32 backward rows for tensor cores (sm_80 and newer): the portable kernels with 3xTF32 products.
#include "bwd_launch.cuh"
#include "product_tf32.cuh"

namespace flash::simt {

namespace {

template <int kRow>
struct BwdTf32 {
  static constexpr int kHeadDim = kInstances[kRow].head_dim;
  using Large = Traits<Pass::kBwd, Tf32x3, kHeadDim, false>;
  using Compact = Traits<Pass::kBwd, Tf32x3, kHeadDim, kHeadDim == 128>;  // at 64 the large tiles fit everywhere

  static void bwd(const BwdParams& p, Stream stream) {
    const DeviceGuard guard(p.device);
    with_fitting_tile<Large, Compact>(p.device, [&](auto traits) { launch_bwd<decltype(traits)>(p, stream); });
  }
  static int64_t bwd_workspace(const BwdParams&) { return 0; }
};

constexpr bool belongs(const Key& k) { return k.pass == Pass::kBwd && k.arch == Arch::kSm80 && k.dtype == DType::kF32; }

const RegisterRows<belongs, BwdTf32> kRegistered;

}  // namespace

}  // namespace flash::simt
