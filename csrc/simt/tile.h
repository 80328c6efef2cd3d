// Tile numbers of the portable kernels, in one place, each row with its reason.
#pragma once

#include "../attn/host_device.h"
#include "../instances.h"

namespace flash::simt {

// How a warp multiplies: fp32 FMA (any GPU), or three TF32 tensor-core products per fp32 product (sm_80 and newer).
enum class Product : uint8_t { kFma, kTf32x3 };

// A CTA keeps kBlockM = warps * warp_rows rows in shared memory (queries, or keys in the kernel for dk and dv) and
// streams the other side past them, block_n rows at a time. A warp owns warp_rows whole rows of each score tile.
struct Tile {
  int warps;
  int warp_rows;  // FMA: a multiple of 4, TF32: of 16
  int block_n;    // FMA: a multiple of 8, TF32: of 8
  int min_ctas;   // per multiprocessor: the register budget is 65536 / (32 * warps * min_ctas)

  constexpr int block_m() const { return warps * warp_rows; }
  constexpr int threads() const { return 32 * warps; }
};

// kCompact fits the 64 KiB of shared memory that sm_75 has (99 KiB on sm_86, sm_89, sm_120); the others want 227 KiB or
// less.
constexpr Tile tile_of(Pass pass, Product product, int head_dim, bool compact) {
#ifdef FLASH_TUNE_WARPS  // bench.tune builds one row with other numbers
  return {FLASH_TUNE_WARPS, FLASH_TUNE_WARP_ROWS, FLASH_TUNE_BLOCK_N, FLASH_TUNE_MIN_CTAS};
#endif
  const bool fwd = pass == Pass::kFwd;
  if (product == Product::kTf32x3) {
    // 16 rows are one mma tile; the accumulators of 16 rows take head_dim / 2 registers per thread (twice that in dk,
    // dv).
    if (fwd) return head_dim == 64 ? Tile{4, 32, 32, 2} : Tile{4, 16, 64, 2};
    return head_dim == 64 ? Tile{4, 16, 32, 3} : Tile{4, 16, 32, 2};
  }
  if (compact) {
    if (fwd) return head_dim == 64 ? Tile{4, 16, 32, 2} : head_dim == 128 ? Tile{4, 16, 16, 1} : Tile{4, 8, 8, 1};
    return head_dim == 64 ? Tile{4, 16, 32, 1} : head_dim == 128 ? Tile{4, 8, 16, 1} : Tile{4, 4, 8, 1};
  }
  // 8 x 8 numbers per thread (warp_rows 32, block_n 64) need one shared load of 16 bytes per 16 FMAs: below that shared
  // memory is the limit. Two CTAs per multiprocessor hide each other's waits at 64; at 128 one CTA of 8 warps does.
  if (fwd) return head_dim == 64 ? Tile{4, 32, 64, 2} : head_dim == 128 ? Tile{8, 16, 64, 1} : Tile{4, 16, 32, 1};
  // Backward keeps two accumulators (dk, dv) and two score tiles: half the rows of the forward.
  return head_dim == 64 ? Tile{4, 16, 64, 2} : head_dim == 128 ? Tile{4, 16, 32, 2} : Tile{4, 8, 32, 1};
}

// Rows of a tile in shared memory are 4 floats longer than they need be: 8 lanes that read 16 bytes of 8 consecutive
// rows then hit 32 different banks.
FLASH_HD constexpr int tile_stride(int head_dim) { return head_dim + 4; }

// FMA warps exchange their probabilities through shared memory (TF32 warps do not). 8 more floats per row spread the
// rows that are written together over the banks.
FLASH_HD constexpr int scratch_stride(int block_n) { return block_n + 8; }

constexpr int scratch_floats(Product product, const Tile& t) {
  return product == Product::kFma ? t.block_m() * scratch_stride(t.block_n) : 0;
}

// Forward: sQ, sK, sV, scratch.
constexpr int fwd_shared_bytes(Product product, int head_dim, bool compact) {
  const Tile t = tile_of(Pass::kFwd, product, head_dim, compact);
  return 4 * ((t.block_m() + 2 * t.block_n) * tile_stride(head_dim) + scratch_floats(product, t));
}

// Backward: two resident and two streamed tiles, lse and delta of the streamed rows, and scratch or dS (TF32).
constexpr int bwd_shared_bytes(Product product, int head_dim, bool compact) {
  const Tile t = tile_of(Pass::kBwd, product, head_dim, compact);
  const int ds_floats = product == Product::kTf32x3 ? t.block_n * (t.block_m() + 8) : 0;
  return 4 * (2 * (t.block_m() + t.block_n) * tile_stride(head_dim) + 2 * t.block_n + scratch_floats(product, t) +
              ds_floats);
}

}  // namespace flash::simt
