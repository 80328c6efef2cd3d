// Hopper backward, head_dim up to 96.
#include "bwd_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_bwd<96>, BwdSm90> kRegistered;
}
