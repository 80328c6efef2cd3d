// The forward rows of the portable path, fp32 FMA.
#include "fwd_kernel.cuh"
#include "product_fma.cuh"

namespace flash::simt {

namespace {

template <int kRow>
struct FwdSimt {
  template <bool kCompact>
  using T = Traits<Pass::kFwd, Fma, kInstances[kRow].head_dim, kCompact>;

  template <bool kCompact>
  static void run(const FwdParams& p, Stream stream) {
    launch<T<kCompact>>(fwd_simt_kernel<T<kCompact>>, "fwd_simt", p,
                        grid_of(p.seqlen_q, T<kCompact>::kBlockM, p.num_heads, p.batch), stream);
  }

  static void fwd(const FwdParams& p, Stream stream) {
    const DeviceGuard guard(p.device);
    if (T<false>::kSharedBytes <= shared_memory_limit(p.device)) {
      run<false>(p, stream);
    } else {
      run<true>(p, stream);
    }
  }
};

constexpr bool belongs(const Key& k) { return k.pass == Pass::kFwd && k.arch == Arch::kSimt; }

const RegisterRows<belongs, FwdSimt> kRegistered;

}  // namespace

}  // namespace flash::simt
