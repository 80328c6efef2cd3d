// Host side of the Hopper backward: workspace, tensor maps, the launches.
#pragma once

#include <algorithm>

#include "../attn/launch.cuh"
#include "bwd_kernel.cuh"
#include "bwd_pair_kernel.cuh"
#include "bwd_postprocess.cuh"
#include "bwd_preprocess.cuh"
#include "bwd_row_scales.cuh"
#include "bwd_tail.cuh"
#include "tensor_maps.h"

namespace flash::sm90 {

// Heads whose queries, output gradients and dq_accum (8 bytes per element) stay in the L2 cache together.
inline int heads_in_l2(const BwdParams& p) {
  constexpr int64_t kBytes = 40 << 20;
  const int64_t head = int64_t(8) * p.seqlen_q * p.head_dim * (p.num_heads / p.num_heads_kv);
  int heads = 1;
  while (heads * 2 * head <= kBytes && heads < int64_t(p.batch) * p.num_heads_kv) heads *= 2;
  return heads;
}

// The main kernels add dS to the gradient of a bias where it goes, atomically (bwd_helper.cuh). A bias of one row
// or column would get all of it in a few places, and the order of the additions is not fixed. With softcap dS holds its
// derivative, which the gradient of a bias, added behind it, does not.
inline bool adds_to_dbias(const BwdParams& p) {
  return p.dbias.ptr != nullptr && !p.deterministic && p.dbias.row != 0 && p.dbias.col == 1 && p.softcap == 0.f;
}

inline BwdArgs bwd_args(const BwdParams& p, int block_m, int block_n, int rows_k, bool copies_bias, bool natural_lse) {
  FLASH_CHECK_ARG(p.head_dim % 8 == 0 && p.head_dim_v % 8 == 0, "head_dim must be a multiple of 8, got ", p.head_dim,
                  " and ", p.head_dim_v);
  check_rows(p);
  ptx::check_aligned(p.out, 2, "out");
  ptx::check_aligned(p.dq, 2, "dq");
  ptx::check_aligned(p.dk, 2, "dk");
  ptx::check_aligned(p.dv, 2, "dv");
  const BwdWorkspace w = BwdWorkspace::of(p, block_m);
  BwdArgs a;
  a.map_q = map_of_queries(p.q, p, p.head_dim, block_m, "q");
  a.map_k = map_of_keys(p.k, p, p.head_dim, rows_k, "k");
  a.map_v = map_of_keys(p.v, p, p.head_dim_v, rows_k, "v");
  a.map_dout = map_of_queries(p.dout, p, p.head_dim_v, block_m, "dout");
  a.step_q = ptx::coordinate_steps(p.q);
  a.step_k = ptx::coordinate_steps(p.k);
  a.step_v = ptx::coordinate_steps(p.v);
  a.step_dout = ptx::coordinate_steps(p.dout);
  a.p = p;
  if (!adds_to_dbias(p)) a.p.dbias = {};
  const int64_t heads = int64_t(p.batch) * p.num_heads_kv, blocks = heads * ceil_div(p.seqlen_k, block_n);
  FLASH_CHECK_ARG(std::max(heads, blocks) <= (1 << 30), "the backward is limited to 2^30 blocks of keys, got ",
                  std::max(heads, blocks));
  const bool uneven = p.window_right >= 0 && p.window_left < 0;  // causal: the first keys have the most work
  // Sequences that add to the same gradient of a bias meet in the L2 cache.
  a.batch_first = a.p.dbias.ptr != nullptr && a.p.dbias.batch == 0;
  const int section = std::max(uneven ? heads_in_l2(p) : 1, a.batch_first ? p.batch : 1);
  a.order = {ceil_div(p.seqlen_k, block_n), int(heads), std::min(section, std::max(int(heads), 1))};
  a.bands = w.bands;
  char* workspace = static_cast<char*>(p.workspace);
  a.stats = reinterpret_cast<float*>(workspace + w.stats);
  a.dq_accum = reinterpret_cast<float*>(workspace + w.dq_accum);
  a.row_scale = reinterpret_cast<float*>(workspace + w.row_scale);
  a.key_bounds = reinterpret_cast<KeyBounds*>(workspace + w.key_bounds);
  a.key_groups = w.key_groups;
  a.lse_scale = natural_lse ? 1.f : kLog2e;
  a.copies_bias = copies_bias;
  if (copies_bias) a.map_bias = bias_map(p);
  a.step_bias = ptx::coordinate_steps(strided(p.bias));
  return a;
}

// `early`: as launch_kernel has it.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), bool early, int64_t blocks, int threads, int shared_bytes,
            cudaStream_t stream, const Args&... args) {
  FLASH_CHECK_ARG(blocks <= INT32_MAX, name, " needs ", blocks, " thread blocks: at most ", INT32_MAX);
  if (blocks == 0) return;
  launch_kernel(name, kernel, early, dim3(unsigned(blocks)), threads, shared_bytes, stream, args...);
}

template <class T, int kHeadDim, int kHeadDimV>
void launch_preprocess(const BwdArgs& args, cudaStream_t stream) {
  const BwdParams& p = args.p;
  constexpr int kWarps = kPreprocessThreads / 32, kHeads = PreprocessTile<padded_columns(kHeadDimV)>::kHeads;
  const int64_t groups = int64_t(p.batch) * p.num_heads_kv * ceil_div(p.seqlen_k, bounds_keys(kHeadDim));
  const PreprocessGrid grid{ceil_div(p.seqlen_q, kBandRows), ceil_div(p.num_heads, kHeads),
                            p.deterministic ? (groups + kWarps - 1) / kWarps : 0};
  launch("bwd_preprocess", bwd_preprocess<T, kHeadDim, kHeadDimV>, false, grid.count(p.batch), kPreprocessThreads, 0,
         stream, args, grid);
}

template <int kHeadDim>
void launch_row_scales(const BwdArgs& args, cudaStream_t stream) {
  const ScalesGrid grid{ceil_div(args.p.seqlen_q, ScalesGrid::kRows)};
  launch("bwd_row_scales", bwd_row_scales<kHeadDim>, true, grid.count(args.p.batch, args.p.num_heads),
         ScalesGrid::kThreads, 0, stream, args, grid);
}

// Before the other kernels: nothing may come between those that start ahead of each other's end.
template <class T>
void launch_tail(const BwdArgs& args, cudaStream_t stream) {
  if (!args.p.packed()) return;
  bwd_tail<T><<<kTailBlocks, kTailThreads, 0, stream>>>(args);
  check_launch("bwd_tail");
}

template <class T, int kHeadDim>
void launch_postprocess(const BwdArgs& args, cudaStream_t stream) {
  const PostprocessGrid grid{ceil_div(args.p.seqlen_q, kBandRows)};
  launch("bwd_postprocess", bwd_postprocess<T, kHeadDim>, true,
         grid.count(args.p.batch, args.p.num_heads, PostprocessTile<kHeadDim>::kPieces), 32 * PostprocessGrid::kWarps,
         0, stream, args, grid);
}

// The main kernel up to head_dim 128: every thread block has keys of its own.
template <class BlockTraits>
struct SingleBlocks {
  using Traits = BlockTraits;
  static constexpr int kBlockN = Traits::kBlockN, kRowsOfCopy = kBlockN;
  static constexpr int kHeadDimV = Traits::kHeadDim;

  static void launch_main(const BwdArgs& args, cudaStream_t stream) {
    const int64_t blocks = std::min<int64_t>(args.order.count(), multiprocessors(args.p.device));
    launch("bwd_sm90", bwd_kernel<Traits>, true, blocks, Traits::kThreads, BwdSmem<Traits>::kBytes, stream, args);
  }
};

// Pairs that the device runs at once: not every multiprocessor has a neighbour. The driver is asked once.
template <class Traits>
int pairs_at_once(int device) {
  static thread_local KnownPerDevice known;
  return known.get(device, [&] {
    constexpr int kBytes = BwdPairSmem<Traits>::kBytes;
    allow_shared_memory(bwd_pair_kernel<Traits>, kBytes);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(2);
    config.blockDim = dim3(unsigned(Traits::kThreads));
    config.dynamicSmemBytes = size_t(kBytes);
    int pairs = 0;
    FLASH_CHECK_CUDA(cudaOccupancyMaxActiveClusters(&pairs, bwd_pair_kernel<Traits>, &config), "bwd_pair_sm90");
    return std::max(1, pairs);  // a launch that cannot be says so
  });
}

// The main kernel for head_dim 192 and 256: two thread blocks share their keys.
template <class PairTraits>
struct Pairs {
  using Traits = PairTraits;
  static constexpr int kBlockN = Traits::kTile.block_n, kRowsOfCopy = Traits::kKeys;
  static constexpr int kHeadDimV = Traits::kHeadDimV;

  static void launch_main(const BwdArgs& args, cudaStream_t stream) {
    const int64_t pairs = std::min<int64_t>(args.order.count(), pairs_at_once<Traits>(args.p.device));
    launch("bwd_pair_sm90", bwd_pair_kernel<Traits>, true, 2 * pairs, Traits::kThreads, BwdPairSmem<Traits>::kBytes,
           stream, args);
  }
};

using LaunchMain = void (*)(const BwdArgs&, cudaStream_t);

// `natural_lse`: the main kernel may add a bias, in whose units it takes the LSE.
template <class Blocks>
void launch_bwd(const BwdParams& p, bool copies_bias, bool natural_lse, LaunchMain launch_main, Stream stream) {
  using Traits = typename Blocks::Traits;
  using T = typename Traits::T;
  const DeviceGuard guard(p.device);
  const cudaStream_t s = cuda_stream(stream);
  BwdArgs args = bwd_args(p, Traits::kBlockM, Blocks::kBlockN, Blocks::kRowsOfCopy, copies_bias, natural_lse);
  args.counter_slot = counter_slot(p.device, s);
  launch_tail<T>(args, s);
  launch_preprocess<T, Traits::kHeadDim, Blocks::kHeadDimV>(args, s);
  if (p.deterministic) launch_row_scales<Traits::kHeadDim>(args, s);
  launch_main(args, s);
  launch_postprocess<T, Traits::kHeadDim>(args, s);
}

template <int kRow, Option kOption>
auto blocks_of_row() {
  constexpr Key kKey = kInstances[kRow];
  constexpr bool kGeneral = kKey.variant == Variant::kGeneral;
  if constexpr (kKey.head_dim <= 128)
    return SingleBlocks<BwdTraits<kKey.dtype, kKey.head_dim, kGeneral, kOption>>();
  else
    return Pairs<BwdPairTraits<kKey.dtype, kKey.head_dim, kKey.head_dim_v, kGeneral, kOption>>();
}
template <int kRow, Option kOption>
using BlocksOfRow = decltype(blocks_of_row<kRow, kOption>());

// The main kernels for one option that bwd_sm90_options.cu holds, about half of what a general row takes to compile.
template <int kRow>
struct BwdOptions {
  inline static LaunchMain launch_main[kNumOptions] = {};
  static void add() { add<Option::kSoftcap, Option::kAlibi, Option::kDropout>(); }

 private:
  template <Option... kOptions>
  static void add() {
    ((launch_main[int(kOptions)] = BlocksOfRow<kRow, kOptions>::launch_main), ...);
  }
};

// Registered for the rows of one head_dim by the .cu files.
template <int kRow>
struct BwdSm90 {
  static constexpr bool kGeneral = kInstances[kRow].variant == Variant::kGeneral;
  using Blocks = BlocksOfRow<kRow, Option::kAny>;  // tile numbers are the same for all options

  static void bwd(const BwdParams& p, Stream stream) {
    if constexpr (kGeneral) {
      const bool copies_bias = can_copy_bias(p);
      const Option option = option_of(p, copies_bias);
      launch_bwd<Blocks>(p, copies_bias, may_have(option, Option::kBias), launch_main(option), stream);
    } else {
      launch_bwd<Blocks>(p, false, false, Blocks::launch_main, stream);
    }
  }
  static int64_t bwd_workspace(const BwdParams& p) { return BwdWorkspace::of(p, Blocks::Traits::kBlockM).bytes; }
  static bool adds_dbias(const BwdParams& p) { return kGeneral && adds_to_dbias(p); }

 private:
  static LaunchMain launch_main(Option option) {
    if (option == Option::kAny) return Blocks::launch_main;
    if (option == Option::kBias) return BlocksOfRow<kRow, Option::kBias>::launch_main;
    const LaunchMain found = BwdOptions<kRow>::launch_main[int(option)];
    if (found == nullptr) throw std::runtime_error("bwd_sm90_options.cu is missing in this build");
    return found;
  }
};

template <int kHeadDim>
constexpr bool is_bwd(const Key& key) {
  return key.pass == Pass::kBwd && key.arch == Arch::kSm90 && head_dim_of_file(key.head_dim) == kHeadDim;
}

}  // namespace flash::sm90
