// Host side of the FP8 forward: transposition of V, then attention, which begins beside its end.
#pragma once

#include "fp8_kernel.cuh"
#include "fp8_transpose.cuh"
#include "fwd_launch.cuh"

namespace flash::sm90 {

template <class Traits>
int64_t fp8_workspace(const FwdParams& p) {
  if (Traits::kTransposers > 0) return 0;
  return p.num_heads_kv * ValueTiles::of(p, Traits::kBlockN).per_head * Traits::kVBytes;
}

template <class Traits>
void transpose_values(const FwdParams& p, const ValueTiles& tiles, Stream stream) {
  FLASH_CHECK_ARG(p.num_heads_kv <= 65535, "num_heads_kv must be at most 65535, got ", p.num_heads_kv);
  FLASH_CHECK_ARG(p.workspace != nullptr, "workspace must hold ", fp8_workspace<Traits>(p), " bytes, got nullptr");
  launch_kernel("fp8_transpose", fp8_transpose_kernel<Traits::kHeadDimV>, true,
                dim3(unsigned(tiles.per_head), unsigned(p.num_heads_kv)), kTransposeThreads<Traits::kHeadDimV>, 0,
                cuda_stream(stream), p, tiles, static_cast<uint8_t*>(p.workspace));
}

template <class Traits>
void launch_fp8(const FwdParams& p, Stream stream) {
  if (p.batch == 0 || p.num_heads == 0 || p.total_q == 0) return;
  check_sizes(p);
  const DeviceGuard guard(p.device);
  Fp8Args args{};
  args.params = p;
  args.group = p.num_heads / p.num_heads_kv;
  args.packed = p.packed();
  args.value_tiles = ValueTiles::of(p, Traits::kBlockN);
  args.values = static_cast<const uint8_t*>(p.workspace);
  args.value_tile_bytes = Traits::kVBytes;
  set_maps<Traits>(args);
  const int64_t tiles = set_order<Traits>(args);
  args.counter_slot = counter_slot(p.device, cuda_stream(stream));

  if constexpr (Traits::kTransposers == 0) transpose_values<Traits>(p, args.value_tiles, stream);
  const int blocks = int(std::min<int64_t>(multiprocessors(p.device), tiles));
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
    return kGeneral || p.seqlen_k > kLongKeys ? 0 : fp8_workspace<Short>(p);
  }
};

template <int kHeadDim>
constexpr bool is_fp8_fwd(const Key& key) {
  return key.pass == Pass::kFwd && key.arch == Arch::kSm90 && key.dtype == DType::kE4M3 && key.head_dim == kHeadDim;
}

}  // namespace flash::sm90
