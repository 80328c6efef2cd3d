#include "fwd_launch.cuh"

namespace flash::sm80 {
const RegisterRows<is_fwd<64>, FwdSm80> kRegistered;
}
