// Launches the forward of one row of the table.
#pragma once

#include <climits>

#include "../attn/launch.cuh"
#include "fwd_kernel.cuh"

namespace flash::sm80 {

template <int kHeadDim>
constexpr bool is_fwd(const Key& key) {
  return key.pass == Pass::kFwd && key.arch == Arch::kSm80 && key.dtype != DType::kF32 &&
         head_dim_of_file(key.head_dim) == kHeadDim;
}

template <class Traits>
void launch_fwd(const FwdParams& p, cudaStream_t stream) {
  const int tiles = ceil_div(p.seqlen_q, Traits::kBlockM);
  const int64_t blocks = int64_t(tiles) * p.num_heads * p.batch;
  if (blocks == 0) return;
  FLASH_CHECK_ARG(blocks <= INT_MAX, "batch * num_heads * seqlen_q / ", Traits::kBlockM, " must be below 2^31, got ",
                  blocks);
  allow_shared_memory(fwd_kernel<Traits>, Traits::kSmem.bytes);
  const FwdSchedule schedule = FwdSchedule::of(p, tiles, Traits::kTile.kBlocksPerSm);
  fwd_kernel<Traits><<<unsigned(blocks), Traits::kThreads, Traits::kSmem.bytes, stream>>>(p, schedule);
  check_launch("fwd_sm80");
}

template <int kRow>
struct FwdSm80 {
  static constexpr Key kKey = kInstances[kRow];
  template <bool kSmall>
  using Traits = FwdTraits<kKey.dtype, kKey.head_dim, kKey.head_dim_v, kKey.variant == Variant::kGeneral, kSmall>;

  static void fwd(const FwdParams& p, Stream stream) {
    const DeviceGuard guard(p.device);
    if constexpr (!fits(kSharedMemorySm86, 1, Traits<false>::kSmem.bytes))
      if (!fits(shared_memory_of(p.device), 1, Traits<false>::kSmem.bytes))
        return launch_fwd<Traits<true>>(p, cuda_stream(stream));
    launch_fwd<Traits<false>>(p, cuda_stream(stream));
  }
};

}  // namespace flash::sm80
