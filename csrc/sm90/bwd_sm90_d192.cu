#include "bwd_launch.cuh"

namespace flash::sm90 {
constexpr bool belongs(const Key& key) { return is_bwd_sm90(key, 192); }
const RegisterRows<belongs, BwdSm90> kRegistered;
}  // namespace flash::sm90
