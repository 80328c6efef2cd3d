// Hopper FP8 forward, head_dim up to 128.
#include "fp8_launch.cuh"

namespace flash::sm90 {
const RegisterRows<is_fp8_fwd<128>, FwdSm90Fp8> kRegistered;
}
