// Backward from sm_80 on, head_dim up to 128.
#include "bwd_launch.cuh"

namespace flash::sm80 {
const RegisterRows<is_bwd<128>, BwdSm80> kRegistered;
}
