// Hopper forward, head_dim up to 96.
#include "fwd_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_fwd<96>, FwdSm90> kRegistered;
}
