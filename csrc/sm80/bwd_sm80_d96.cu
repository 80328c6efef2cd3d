// Backward from sm_80 on, head_dim up to 96.
#include "bwd_launch.cuh"

namespace flash::sm80 {
const RegisterRows<is_bwd<96>, BwdSm80> kRegistered;
}
