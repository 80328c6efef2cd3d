// The fp32 forward rows for tensor cores (sm_80 and newer): the portable kernel with 3xTF32 products.
#include "fwd_kernel.cuh"
#include "product_tf32.cuh"

namespace flash::simt {

namespace {

template <int kRow>
struct FwdTf32 {
  using T = Traits<Pass::kFwd, Tf32x3, kInstances[kRow].head_dim, false>;

  static void fwd(const FwdParams& p, Stream stream) {
    const DeviceGuard guard(p.device);
    launch_fwd<T>(p, stream);
  }
};

constexpr bool belongs(const Key& k) { return k.pass == Pass::kFwd && k.arch == Arch::kSm80 && k.dtype == DType::kF32; }

const RegisterRows<belongs, FwdTf32> kRegistered;

}  // namespace

}  // namespace flash::simt
