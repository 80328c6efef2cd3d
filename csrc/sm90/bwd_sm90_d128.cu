// Hopper backward, head_dim up to 128.
#include "bwd_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_bwd<128>, BwdSm90> kRegistered;
}
