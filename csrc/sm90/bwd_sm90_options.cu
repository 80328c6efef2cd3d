// Part of every general row: kernels for one option, beside which a second core compiles the rest of the row.
#include "bwd_launch.cuh"

namespace flash::sm90 {
constexpr bool belongs(const Key& key) {
  return key.pass == Pass::kBwd && key.arch == Arch::kSm90 && key.variant == Variant::kGeneral;
}
const RegisterRows<belongs, BwdOptions> kRegistered;
}  // namespace flash::sm90
