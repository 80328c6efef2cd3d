// griddepcontrol: programmatic dependent launch. A kernel launched with the attribute may start before the one in front
// of it in the stream has ended; what that one wrote may be read behind griddepcontrol_wait only.
#pragma once

namespace flash::ptx {

// Until the kernels in front have ended and their writes are visible; passes at once without the launch attribute.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel in the stream may start once every block has said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace flash::ptx
