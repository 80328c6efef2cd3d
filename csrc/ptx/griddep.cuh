// griddepcontrol: programmatic dependent launch. A kernel launched with the attribute may start before the one in front
// of it in the stream has ended; what that one wrote may be read behind griddepcontrol_wait only. Guarded here, since
// small kernels without a guard of their own use it: an extension's files are all compiled for all its architectures.
#pragma once

namespace flash::ptx {

// Until the kernels in front have ended and their writes are visible; passes at once without the launch attribute.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel in the stream may start once every block has said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flash::ptx
