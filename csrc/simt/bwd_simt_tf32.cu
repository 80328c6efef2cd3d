// The fp32 backward rows for tensor cores (sm_80 and newer): the portable kernels with 3xTF32 products.
#include "bwd_launch.cuh"
#include "product_tf32.cuh"

namespace flash::simt {

namespace {

template <int kRow>
struct BwdTf32 {
  using T = Traits<Pass::kBwd, Tf32x3, kInstances[kRow].head_dim, false>;

  static void bwd(const BwdParams& p, Stream stream) {
    const DeviceGuard guard(p.device);
    launch_bwd<T>(p, stream);
  }
  static int64_t bwd_workspace(const BwdParams&) { return 0; }
};

constexpr bool belongs(const Key& k) { return k.pass == Pass::kBwd && k.arch == Arch::kSm80 && k.dtype == DType::kF32; }

const RegisterRows<belongs, BwdTf32> kRegistered;

}  // namespace

}  // namespace flash::simt
