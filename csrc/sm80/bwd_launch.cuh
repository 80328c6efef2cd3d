// Launches the backward of one row of the table: delta, the main kernel, dq.
#pragma once

#include <algorithm>
#include <climits>

#include "../attn/launch.cuh"
#include "bwd_kernel.cuh"
#include "bwd_postprocess.cuh"
#include "bwd_preprocess.cuh"
#include "bwd_tail.cuh"

namespace flash::sm80 {

template <int kHeadDim>
constexpr bool is_bwd(const Key& key) {
  return key.pass == Pass::kBwd && key.arch == Arch::kSm80 && key.dtype != DType::kF32 &&
         head_dim_of_file(key.head_dim) == kHeadDim;
}

inline unsigned grid_of(int tiles, int num_heads, int batch, const char* what) {
  const int64_t blocks = int64_t(tiles) * num_heads * batch;
  FLASH_CHECK_ARG(blocks <= INT_MAX, what, " needs ", blocks, " blocks: batch * heads * seqlen is too large");
  return unsigned(blocks);
}

template <class Traits>
void launch_bwd(const BwdParams& p, const SharedMemory& memory, cudaStream_t stream) {
  const BwdWorkspace<Traits> workspace{p};
  const int64_t bytes = workspace.bytes();
  if (bytes > 0) FLASH_CHECK_CUDA(cudaMemsetAsync(p.workspace, 0, bytes, stream), "bwd_sm80: clearing dq");

  const int row_blocks = ceil_div(p.seqlen_q, BwdPreprocess::kRows);
  const unsigned rows = grid_of(row_blocks, p.num_heads, p.batch, "bwd_preprocess");
  if (rows > 0)
    bwd_preprocess<typename Traits::T>
        <<<rows, BwdPreprocess::kThreads, 0, stream>>>(p, TileOrder::head_by_head(row_blocks, p.num_heads));
  check_launch("bwd_preprocess");

  if (p.packed()) bwd_tail<typename Traits::T><<<BwdTail::kBlocks, BwdTail::kThreads, 0, stream>>>(p);
  check_launch("bwd_tail");

  const int stages = choose_stages(memory, Traits::kTile.kBlocksPerSm, Traits::kSmem.bytes(2), Traits::kSmem.bytes(1));
  const int smem_bytes = Traits::kSmem.bytes(stages);
  const int splits = workspace.splits();
  const int key_blocks = ceil_div(p.seqlen_k, Traits::kBlockN);
  const unsigned key_tiles = grid_of(key_blocks, p.num_heads_kv, p.batch, "bwd_sm80");
  allow_shared_memory(bwd_kernel<Traits>, smem_bytes);
  if (key_tiles > 0)
    bwd_kernel<Traits><<<key_tiles * splits, Traits::kThreads, smem_bytes, stream>>>(
        p, BwdSchedule::of(p, key_blocks, splits, stages));
  check_launch("bwd_sm80");

  if (splits > 1 && key_tiles > 0) {
    allow_shared_memory(bwd_key_postprocess<Traits>, Traits::kSmem.ds);
    bwd_key_postprocess<Traits><<<key_tiles, Traits::kThreads, Traits::kSmem.ds, stream>>>(
        p, TileOrder::head_by_head(key_blocks, p.num_heads_kv));
    check_launch("bwd_key_postprocess");
  }

  const int query_blocks = ceil_div(p.seqlen_q, Traits::kBlockM);
  const unsigned tiles = grid_of(query_blocks, p.num_heads, p.batch, "bwd_postprocess");
  if (tiles > 0)
    bwd_postprocess<Traits>
        <<<tiles, Traits::kThreads, 0, stream>>>(p, TileOrder::head_by_head(query_blocks, p.num_heads));
  check_launch("bwd_postprocess");
}

template <int kRow>
struct BwdSm80 {
  static constexpr Key kKey = kInstances[kRow];
  template <bool kSmall>
  using Traits = BwdTraits<kKey.dtype, kKey.head_dim, kKey.head_dim_v, kKey.variant == Variant::kGeneral, kSmall>;
  static constexpr bool kFitsEverywhere = fits(kSharedMemorySm86, 1, Traits<false>::kSmem.bytes(1));

  // The larger of the two tiles' needs: which one runs depends on the device.
  static int64_t bwd_workspace(const BwdParams& p) {
    const int64_t bytes = BwdWorkspace<Traits<false>>{p}.bytes();
    if constexpr (kFitsEverywhere) return bytes;
    return std::max(bytes, BwdWorkspace<Traits<true>>{p}.bytes());
  }

  static void bwd(const BwdParams& p, Stream stream) {
    const DeviceGuard guard(p.device);
    const SharedMemory memory = shared_memory_of(p.device);
    if constexpr (!kFitsEverywhere)
      if (!fits(memory, 1, Traits<false>::kSmem.bytes(1)))
        return launch_bwd<Traits<true>>(p, memory, cuda_stream(stream));
    launch_bwd<Traits<false>>(p, memory, cuda_stream(stream));
  }
};

}  // namespace flash::sm80
