// Hopper FP8 forward, head_dim up to 96.
#include "fp8_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_fp8_fwd<96>, FwdSm90Fp8> kRegistered;
}
