// Backward from sm_80 on, head_dim up to 192.
#include "bwd_launch.cuh"

namespace flash::sm80 {
const RegisterRows<is_bwd<192>, BwdSm80> kRegistered;
}
