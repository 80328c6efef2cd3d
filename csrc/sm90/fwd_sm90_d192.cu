// Hopper forward, head_dim up to 192.
#include "fwd_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_fwd<192>, FwdSm90> kRegistered;
}
