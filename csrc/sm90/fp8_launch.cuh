// Host side of the FP8 forward.
#pragma once

#include "fp8_kernel.cuh"
#include "fp8_transpose.cuh"
#include "fwd_launch.cuh"

namespace flash::sm90 {

// V^T, and behind it a counter for each of its tiles and one of what is claimed.
struct Fp8Workspace {
  int64_t tiles, bytes_of_values;

  template <class Traits>
  static Fp8Workspace of(const FwdParams& p) {
    const int64_t tiles = p.num_heads_kv * ValueTiles::of(p, Traits::kBlockN).per_head;
    return {tiles, tiles * Traits::kVBytes};
  }
  int64_t counters() const { return tiles + 1; }
  int64_t bytes() const { return bytes_of_values + counters() * int64_t(sizeof(uint32_t)); }
};

template <class Traits>
void launch_fp8(const FwdParams& p, Stream stream) {
  if (p.batch == 0 || p.num_heads == 0 || p.total_q == 0) return;
  check_rows(p);
  ptx::check_aligned(p.out, 2, "out");
  const auto workspace = Fp8Workspace::of<Traits>(p);
  FLASH_CHECK_ARG(p.workspace != nullptr, "workspace must hold ", workspace.bytes(), " bytes, got nullptr");
  const DeviceGuard guard(p.device);
  Fp8Args args{};
  args.params = p;
  args.group = p.num_heads / p.num_heads_kv;
  args.packed = p.packed();
  set_maps<Traits>(args);
  const int64_t tiles = set_order<Traits>(args);
  args.counter_slot = counter_slot(p.device, cuda_stream(stream));
  const int most_blocks = multiprocessors(p.device);
  int64_t pieces = tiles;
  if (may_split_tiles(args)) {
    args.tail =
        split_tail(args.num_tiles, int64_t(p.batch) * p.num_heads, p.seqlen_q, Traits::kWarpgroups, most_blocks);
    pieces = args.tail.count();
  }
  args.value_tiles = ValueTiles::of(p, Traits::kBlockN);
  // As many heads together as are worked on at a time.
  const int heads =
      args.order.longest_first ? args.order.section : ceil_div(most_blocks, max_of(1, args.order.m_blocks));
  args.value_jobs =
      ValueJobs::of(p, args.value_tiles, min_of(heads / args.group, p.batch * p.num_heads_kv), Traits::kJobs);
  args.values = static_cast<uint8_t*>(p.workspace);
  if (!has_counters(args.counter_slot, workspace.tiles)) {
    args.values_ready = reinterpret_cast<uint32_t*>(args.values + workspace.bytes_of_values);
    args.values_claimed = args.values_ready + workspace.tiles;
    launch_kernel("fp8_begin", fp8_begin_kernel, true, dim3(unsigned((workspace.counters() + 1023) / 1024)), 1024, 0,
                  cuda_stream(stream), args.values_ready, workspace.counters());
  }
  // Blocks without queries turn values around all the same: with few queries that is most of the work.
  const int blocks = int(std::min<int64_t>(most_blocks, std::max<int64_t>(pieces, args.value_jobs.count / 3 + 1)));
  launch_kernel("fwd_sm90_fp8", fp8_kernel<Traits>, true, dim3(blocks), Traits::kThreads, Fp8Smem<Traits>::kBytes,
                cuda_stream(stream), args);
}

// V's columns of the row in `kParts` calls: two O of more than 128 columns do not fit the registers.
template <int kHeadDim, bool kGeneral>
struct Fp8TwoLevels {
  static constexpr int kParts = kHeadDim <= 128 ? 1 : 2;
  using Traits = Fp8Traits<FwdDims<kHeadDim, kHeadDim / kParts>, kGeneral, true>;

  static void launch(const FwdParams& p, Stream stream) {
    for (int first = 0; first < p.head_dim_v; first += Traits::kHeadDimV) {
      FwdParams part = p;
      part.v.ptr = static_cast<uint8_t*>(p.v.ptr) + first;
      part.out.ptr = static_cast<uint16_t*>(p.out.ptr) + first;
      part.head_dim_v = min_of(p.head_dim_v - first, Traits::kHeadDimV);
      launch_fp8<Traits>(part, stream);
    }
  }
};

// Rows of the table.
template <int kRow>
struct FwdSm90Fp8 {
  static constexpr Key kKey = kInstances[kRow];
  static constexpr bool kGeneral = kKey.variant == Variant::kGeneral;
  using Short = Fp8Traits<FwdDims<kKey.head_dim, kKey.head_dim>, false, false>;
  using Long = Fp8TwoLevels<kKey.head_dim, kGeneral>;

  static void fwd(const FwdParams& p, Stream stream) {
    if constexpr (!kGeneral) {
      if (p.seqlen_k <= kLongKeys) return launch_fp8<Short>(p, stream);
    }
    Long::launch(p, stream);
  }
  static int64_t fwd_workspace(const FwdParams& p) {
    return kGeneral || p.seqlen_k > kLongKeys ? Fp8Workspace::of<typename Long::Traits>(p).bytes()
                                              : Fp8Workspace::of<Short>(p).bytes();
  }
};

template <int kHeadDim>
constexpr bool is_fp8_fwd(const Key& key) {
  return key.pass == Pass::kFwd && key.arch == Arch::kSm90 && key.dtype == DType::kE4M3 &&
         head_dim_of_file(key.head_dim) == kHeadDim;
}

}  // namespace flash::sm90
