// Backward from sm_80 on, head_dim up to 64.
#include "bwd_launch.cuh"

namespace flash::sm80 {
const RegisterRows<is_bwd<64>, BwdSm80> kRegistered;
}
