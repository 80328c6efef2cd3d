// The rows for the gradient of the additive bias; every path uses them.
#include "dbias_kernel.cuh"
#include "product_fma.cuh"

namespace flash::simt {

namespace {

template <int kRow>
struct DBiasSimt {
  template <bool kCompact>
  using T = Traits<Pass::kDBias, Fma, kInstances[kRow].head_dim, kCompact>;

  template <bool kCompact>
  static void run(const BwdParams& p, Stream stream) {
    int parts[4] = {p.batch, p.num_heads, ceil_div(p.seqlen_q, T<kCompact>::kBlockM),
                    ceil_div(p.seqlen_k, T<kCompact>::kBlockN)};
    BiasWork::split(p.dbias, parts);
    launch<T<kCompact>>(dbias_simt_kernel<T<kCompact>>, "dbias_simt", p,
                        int64_t(parts[0]) * parts[1] * parts[2] * parts[3], stream);
  }

  static void bwd(const BwdParams& p, Stream stream) {
    if (p.dbias.ptr == nullptr) return;
    const DeviceGuard guard(p.device);
    if (T<false>::kSharedBytes <= shared_memory_limit(p.device)) {
      run<false>(p, stream);
    } else {
      run<true>(p, stream);
    }
  }
  static int64_t bwd_workspace(const BwdParams&) { return 0; }
};

constexpr bool belongs(const Key& k) { return k.pass == Pass::kDBias && k.arch == Arch::kSimt; }

const RegisterRows<belongs, DBiasSimt> kRegistered;

}  // namespace

}  // namespace flash::simt
