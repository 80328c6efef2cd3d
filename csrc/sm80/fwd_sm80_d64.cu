// Forward from sm_80 on, head_dim up to 64.
#include "fwd_launch.cuh"

namespace flash::sm80 {
const RegisterRows<is_fwd<64>, FwdSm80> kRegistered;
}
