// Hopper backward, head_dim up to 192.
#include "bwd_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_bwd<192>, BwdSm90> kRegistered;
}
