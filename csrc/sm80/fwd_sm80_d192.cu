// Forward from sm_80 on, head_dim up to 192.
#include "fwd_launch.cuh"

namespace flash::sm80 {
const RegisterRows<is_fwd<192>, FwdSm80> kRegistered;
}
