#include "bwd_launch.cuh"

namespace flash::sm90 {
// Softcap, ALiBi, bias and dropout need registers that only a pair of thread blocks has to spare.
constexpr bool is_plain(const Key& key) { return is_bwd_sm90(key, 128) && key.variant == Variant::kPlain; }
constexpr bool is_general(const Key& key) { return is_bwd_sm90(key, 128) && key.variant == Variant::kGeneral; }
const RegisterRows<is_plain, BwdSm90> kPlainRegistered;
const RegisterRows<is_general, BwdPairSm90> kGeneralRegistered;
}  // namespace flash::sm90
