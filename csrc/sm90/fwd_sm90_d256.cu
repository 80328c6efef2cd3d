// Hopper forward, head_dim up to 256.
#include "fwd_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_fwd<256>, FwdSm90> kRegistered;
}
