#include "bwd_launch.cuh"

namespace flash::sm80 {
const RegisterRows<is_bwd<256>, BwdSm80> kRegistered;
}
