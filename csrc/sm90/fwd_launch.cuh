// Host side of the Hopper forward: tensor maps, tile order, launch.
#pragma once

#include <algorithm>

#include "counters.cuh"
#include "fwd_kernel.cuh"
#include "tensor_maps.h"

namespace flash::sm90 {

// Keys and values of the heads that are worked on together should stay in the L2 cache.
inline constexpr int64_t kL2Bytes = 32 << 20;

template <class Traits>
void set_maps(FwdArgs& a) {
  const FwdParams& p = a.params;
  Strided k = p.k, v = p.v;
  if (p.total_k == 0) k.ptr = v.ptr = p.q.ptr;  // any mapped memory: every score is masked, every row of V zeroed
  a.map_q = map_of_queries(p.q, p, p.head_dim, 64, "q");
  a.map_k = map_of_keys(k, p, p.head_dim, Traits::kBlockN, "k");
  a.map_v = map_of_keys(v, p, p.head_dim_v, Traits::kValueRows, "v");
  a.copies_bias = Traits::kTile.bias_stages > 0 && can_copy_bias(p, true);
  if (a.copies_bias) a.map_bias = bias_map(p, p.bias.row == 0);
  a.bias_row_step = ptx::coordinate_step(p.bias.row);
  a.zero_v_tail = p.cu_seqlens_k != nullptr || p.seqused_k != nullptr || p.total_k == 0;
  a.step_q = ptx::coordinate_steps(p.q);
  a.step_k = ptx::coordinate_steps(p.k);
  a.step_v = ptx::coordinate_steps(p.v);
  a.step_bias = ptx::coordinate_steps(strided(p.bias));
}

// Returns the number of tiles, for packed calls an upper bound of it.
template <class Traits>
int64_t set_order(FwdArgs& a) {
  const FwdParams& p = a.params;
  const int64_t bytes_per_key = 2 * (int64_t(p.head_dim) + p.head_dim_v);
  const bool longest_first = p.window_right >= 0 && p.window_left < 0;
  if (p.packed()) {
    a.order = {0, p.num_heads, int(kL2Bytes / bytes_per_key), longest_first};
    return p.num_heads * (p.total_q / Traits::kBlockM + p.batch);
  }
  const int64_t heads = int64_t(p.batch) * p.num_heads;
  const int m_blocks = ceil_div(p.seqlen_q, Traits::kBlockM);
  FLASH_CHECK_ARG(heads * m_blocks < (int64_t(1) << 31),
                  "batch * num_heads * seqlen_q is too large: ", heads * m_blocks, " tiles of ", Traits::kBlockM,
                  " queries");
  if (a.copies_bias && p.bias.batch == 0)
    a.batches_together = batches_together(kL2Bytes, p.seqlen_k * bytes_per_key, p.batch);
  const int sequences = int(heads) / a.batches_together;
  a.order = {m_blocks, sequences,
             section_heads(kL2Bytes / a.batches_together, p.seqlen_k * bytes_per_key, a.group, sequences),
             longest_first};
  a.num_tiles = int(heads) * m_blocks;
  return a.num_tiles;
}

// Rows of a piece count from its own first one: the diagonal of a mask would move with them.
inline bool may_split_tiles(const FwdArgs& a) {
  return !a.packed && a.params.window_left < 0 && a.params.window_right < 0;
}

// Returns the number of tiles and pieces.
template <class Traits>
int64_t set_even_tiles(FwdArgs& a, int64_t tiles) {
  const FwdParams& p = a.params;
  a.even = {-1};
  constexpr int kWorthIt = 4096;  // shorter tiles gain nothing by it
  if (!may_split_tiles(a) || p.seqlen_k < kWorthIt) return tiles;
  a.even = EvenTiles::of(p.seqlen_q, Traits::kWarpgroups);
  if (a.even.tall < 0) return tiles;
  a.tail = split_tail(a.num_tiles, a.num_tiles, multiprocessors(p.device));
  return a.tail.count();
}

template <class Traits>
void launch_fwd(const FwdParams& p, Stream stream) {
  if (p.batch == 0 || p.num_heads == 0 || p.total_q == 0) return;
  check_rows(p);
  ptx::check_aligned(p.out, 2, "out");
  const DeviceGuard guard(p.device);
  FwdArgs args{};
  args.params = p;
  args.group = p.num_heads / p.num_heads_kv;
  args.packed = p.packed();
  args.scale = Traits::kGeneral ? ScoreUnits::of(p).to_natural : p.softmax_scale;
  args.scale_log2 = args.scale * kLog2e;
  args.scores_per_log2 = std::min(1.f / args.scale_log2, 1e30f);  // inf would make NaN of -inf
  args.factor_log2 = p.softmax_scale * kLog2e;
  args.qk_per_score = 1.f / p.softmax_scale;
  args.softcap = SoftcapArgs::of(p, args.scale_log2);
  const uint32_t threshold = Dropout::threshold_of(p.dropout_p);
  args.dropout_thresholds = threshold * 0x10001u;
  set_maps<Traits>(args);
  if (Traits::kOptionLoops) args.option = option_of(p, args.copies_bias);
  if (args.option == Option::kDropout && threshold > kMaxThreshold) args.option = Option::kAny;
  if (args.option == Option::kBias && args.qk_per_score > kMaxQkPerScore) args.option = Option::kAny;
  int64_t tiles = set_order<Traits>(args);
  if (!args.packed) args.order.section = short_section(args.order, args.group);  // not FP8: V is turned by sections
  args.counter_slot = counter_slot(p.device, cuda_stream(stream));
  if (Traits::kEvenTiles) tiles = set_even_tiles<Traits>(args, tiles);

  const int blocks = int(std::min<int64_t>(multiprocessors(p.device), tiles));
  launch_kernel("fwd_sm90", fwd_kernel<Traits>, true, dim3(blocks), Traits::kThreads, FwdSmem<Traits>::kBytes,
                cuda_stream(stream), args);
}

// Rows of the table.
template <int kQK, int kV>
struct FwdDims {
  static constexpr int kHeadDim = kQK, kHeadDimV = kV;
};

template <int kRow>
struct FwdSm90 {
  static constexpr Key kKey = kInstances[kRow];
  using Traits = FwdTraits<kKey.dtype, FwdDims<kKey.head_dim, kKey.head_dim_v>, kKey.variant == Variant::kGeneral>;
  static void fwd(const FwdParams& p, Stream stream) { launch_fwd<Traits>(p, stream); }
};

template <int kHeadDim>
constexpr bool is_fwd(const Key& key) {
  return key.pass == Pass::kFwd && key.arch == Arch::kSm90 && key.dtype != DType::kE4M3 &&
         head_dim_of_file(key.head_dim) == kHeadDim;
}

}  // namespace flash::sm90
