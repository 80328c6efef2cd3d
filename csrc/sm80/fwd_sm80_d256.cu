// Forward from sm_80 on, head_dim up to 256.
#include "fwd_launch.cuh"

namespace flash::sm80 {
const RegisterRows<is_fwd<256>, FwdSm80> kRegistered;
}
