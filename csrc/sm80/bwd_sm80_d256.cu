// Backward from sm_80 on, head_dim up to 256.
#include "bwd_launch.cuh"

namespace flash::sm80 {
const RegisterRows<is_bwd<256>, BwdSm80> kRegistered;
}
