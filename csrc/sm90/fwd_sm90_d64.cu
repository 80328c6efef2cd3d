// Hopper forward, head_dim up to 64.
#include "fwd_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_fwd<64>, FwdSm90> kRegistered;
}
