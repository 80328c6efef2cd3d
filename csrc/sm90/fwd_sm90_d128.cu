// Hopper forward, head_dim up to 128.
#include "fwd_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_fwd<128>, FwdSm90> kRegistered;
}
