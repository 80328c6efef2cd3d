// Hopper FP8 forward, head_dim up to 192.
#include "fp8_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_fp8_fwd<192>, FwdSm90Fp8> kRegistered;
}
