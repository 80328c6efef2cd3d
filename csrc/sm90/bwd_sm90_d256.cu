// Hopper backward, head_dim up to 256.
#include "bwd_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_bwd<256>, BwdSm90> kRegistered;
}
