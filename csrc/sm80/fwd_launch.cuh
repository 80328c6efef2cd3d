// Launches the forward of one row of the table.
#pragma once

#include <climits>

#include "../attn/launch.cuh"
#include "fwd_kernel.cuh"
#include "shared_memory.cuh"

namespace flash::sm80 {

template <int kHeadDim>
constexpr bool is_fwd(const Key& key) {
  return key.pass == Pass::kFwd && key.arch == Arch::kSm80 && key.dtype != DType::kF32 && key.head_dim == kHeadDim;
}

template <int kRow>
struct FwdSm80 {
  static void fwd(const FwdParams& params, Stream stream) {
    constexpr Key kKey = kInstances[kRow];
    using Traits = FwdTraits<kKey.dtype, kKey.head_dim, kKey.head_dim_v, kKey.variant == Variant::kGeneral>;
    const int64_t blocks =
        int64_t(ceil_div(params.seqlen_q, Traits::kBlockM)) * params.num_heads * params.batch;
    if (blocks == 0) return;
    FLASH_CHECK_ARG(blocks <= INT_MAX, "batch * num_heads * seqlen_q / ", Traits::kBlockM, " must be below 2^31, got ",
                    blocks);
    const DeviceGuard guard(params.device);
    const int stages = choose_stages(shared_memory_of(params.device), Traits::kTile.kBlocksPerSm,
                                     Traits::smem_bytes(2), Traits::smem_bytes(1));
    const int smem_bytes = Traits::smem_bytes(stages);
    allow_shared_memory(fwd_kernel<Traits>, smem_bytes);
    fwd_kernel<Traits><<<unsigned(blocks), Traits::kThreads, smem_bytes, cuda_stream(stream)>>>(params, stages);
    check_launch("fwd_sm80");
  }
};

}  // namespace flash::sm80
