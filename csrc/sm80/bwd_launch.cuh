// Launches the backward of one row of the table: delta, the main kernel (two from head_dim 192 on), dq.
#pragma once

#include <climits>

#include "../attn/launch.cuh"
#include "bwd_kernel.cuh"
#include "bwd_postprocess.cuh"
#include "bwd_preprocess.cuh"
#include "shared_memory.cuh"

namespace flash::sm80 {

template <int kHeadDim>
constexpr bool is_bwd(const Key& key) {
  return key.pass == Pass::kBwd && key.arch == Arch::kSm80 && key.dtype != DType::kF32 && key.head_dim == kHeadDim;
}

inline unsigned grid_of(int tiles, int num_heads, int batch, const char* what) {
  const int64_t blocks = int64_t(tiles) * num_heads * batch;
  FLASH_CHECK_ARG(blocks <= INT_MAX, what, " needs ", blocks, " blocks: batch * heads * seqlen is too large");
  return unsigned(blocks);
}

template <class Traits>
void launch_bwd(const BwdParams& p, cudaStream_t stream) {
  const unsigned blocks = grid_of(ceil_div(p.seqlen_k, Traits::kBlockN), p.num_heads_kv, p.batch, "bwd_sm80");
  if (blocks == 0) return;
  const int stages = choose_stages(shared_memory_of(p.device), Traits::kTile.kBlocksPerSm, Traits::kSmem.bytes(2),
                                   Traits::kSmem.bytes(1));
  const int smem_bytes = Traits::kSmem.bytes(stages);
  allow_shared_memory(bwd_kernel<Traits>, smem_bytes);
  bwd_kernel<Traits><<<blocks, Traits::kThreads, smem_bytes, stream>>>(p, stages);
  check_launch("bwd_sm80");
}

template <int kRow>
struct BwdSm80 {
  static constexpr Key kKey = kInstances[kRow];
  template <BwdPart kPart>
  using Traits = BwdTraits<kKey.dtype, kKey.head_dim, kKey.head_dim_v, kKey.variant == Variant::kGeneral, kPart>;
  static constexpr bool kSplit = splits(kKey.head_dim, kKey.head_dim_v);
  using KeysTraits = Traits<kSplit ? BwdPart::kKeys : BwdPart::kBoth>;

  static int64_t bwd_workspace(const BwdParams& params) { return KeysTraits::workspace_bytes(params); }

  static void bwd(const BwdParams& p, Stream s) {
    const DeviceGuard guard(p.device);
    const cudaStream_t stream = cuda_stream(s);
    const int64_t bytes = bwd_workspace(p);
    if (bytes > 0) FLASH_CHECK_CUDA(cudaMemsetAsync(p.workspace, 0, bytes, stream), "bwd_sm80: clearing dq");
    const unsigned rows = grid_of(ceil_div(p.seqlen_q, BwdPreprocess::kRows), p.num_heads, p.batch, "bwd_preprocess");
    if (rows > 0) bwd_preprocess<Element<kKey.dtype>><<<rows, BwdPreprocess::kThreads, 0, stream>>>(p);
    check_launch("bwd_preprocess");

    if constexpr (kSplit) launch_bwd<Traits<BwdPart::kValues>>(p, stream);
    launch_bwd<KeysTraits>(p, stream);

    const unsigned tiles = grid_of(ceil_div(p.seqlen_q, KeysTraits::kBlockM), p.num_heads, p.batch, "bwd_postprocess");
    if (tiles > 0) bwd_postprocess<KeysTraits><<<tiles, KeysTraits::kThreads, 0, stream>>>(p);
    check_launch("bwd_postprocess");
  }
};

}  // namespace flash::sm80
