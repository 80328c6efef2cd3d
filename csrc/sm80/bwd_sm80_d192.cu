#include "bwd_launch.cuh"

namespace flash::sm80 {
const RegisterRows<is_bwd<192>, BwdSm80> kRegistered;
}
