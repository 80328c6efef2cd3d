// Hopper backward, head_dim up to 64.
#include "bwd_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_bwd<64>, BwdSm90> kRegistered;
}
