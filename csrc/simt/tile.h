// Tile numbers of the portable kernels, in one place, each row with its reason.
#pragma once

#include "../attn/host_device.h"
#include "../attn/tune.h"
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

// compact: FMA tiles that fit the 64 KiB of shared memory of sm_75, TF32 tiles that fit the 99 KiB of sm_86, sm_89 and
// sm_120. The others need up to 227 KiB (FMA) and 163 KiB; they are the fastest of those measured on an H200.
constexpr Tile fastest_tile(Pass pass, Product product, int head_dim, bool compact) {
  const bool fwd = pass == Pass::kFwd;
  if (product == Product::kTf32x3) {
    // Two CTAs per multiprocessor, so that one multiplies while the other waits. At 64, 32 rows per warp halve the
    // reads and splits of K and V; at 128 their accumulators would spill. Backward holds two accumulators: 16 rows.
    if (fwd) return head_dim == 64 ? Tile{4, 32, 32, 2} : Tile{4, 16, 64, 2};
    return head_dim == 64 ? Tile{4, 16, 64, 2} : compact ? Tile{4, 16, 16, 2} : Tile{4, 16, 32, 2};
  }
  if (compact) {
    // What fits: fewer rows the larger head_dim is.
    if (fwd) return head_dim == 64 ? Tile{4, 16, 32, 2} : head_dim == 128 ? Tile{4, 16, 16, 1} : Tile{4, 8, 8, 1};
    return head_dim == 64 ? Tile{4, 16, 32, 1} : head_dim == 128 ? Tile{4, 8, 16, 1} : Tile{4, 4, 8, 1};
  }
  // 4 x 8 numbers per lane need 12 shared reads of 16 bytes for 128 FMAs; 8 x 8 need fewer, but leave too few registers
  // for a third CTA (64) or for the accumulators (128). At 128, 8 warps share one K and V; at 256 two such CTAs do not
  // fit.
  if (fwd) return head_dim == 64 ? Tile{4, 16, 64, 3} : head_dim == 128 ? Tile{8, 16, 64, 1} : Tile{4, 16, 32, 1};
  // Two accumulators and two score tiles per lane (dk, dv, S, dP).
  return head_dim == 64 ? Tile{4, 16, 64, 2} : head_dim == 128 ? Tile{4, 16, 32, 2} : Tile{4, 8, 32, 1};
}

constexpr Tile tile_of(Pass pass, Product product, int head_dim, bool compact) {
  Tile t = fastest_tile(pass, product, head_dim, compact);
  if (compact) return t;
  if (pass == Pass::kFwd) {
    FLASH_TUNE_FWD;
  } else {
    FLASH_TUNE_BWD;
  }
  return t;
}

// Rows of a tile in shared memory are 4 floats longer than they need be: 8 lanes that read 16 bytes of 8 consecutive
// rows then hit 32 different banks.
FLASH_HD constexpr int tile_stride(int head_dim) { return head_dim + 4; }

// FMA warps exchange their probabilities through shared memory (TF32 warps do not). 8 more floats per row spread the
// rows that are written together over the banks.
FLASH_HD constexpr int scratch_stride(int block_n) { return block_n + 8; }

// TF32 warps exchange dS (block_n queries, block_m keys) where dq is added up; they read two columns of 4 rows at once.
FLASH_HD constexpr int ds_stride(int block_m) { return block_m + 8; }

constexpr int scratch_floats(Pass pass, Product product, const Tile& t) {
  if (product == Product::kFma) return t.block_m() * scratch_stride(t.block_n);
  return pass == Pass::kFwd ? 0 : t.block_n * ds_stride(t.block_m());
}

// Forward: sQ, sK, sV, scratch.
constexpr int fwd_shared_bytes(Product product, int head_dim, bool compact) {
  const Tile t = tile_of(Pass::kFwd, product, head_dim, compact);
  return 4 * ((t.block_m() + 2 * t.block_n) * tile_stride(head_dim) + scratch_floats(Pass::kFwd, product, t));
}

// Backward: two resident and two streamed tiles, lse and delta of the streamed rows, scratch.
constexpr int bwd_shared_bytes(Product product, int head_dim, bool compact) {
  const Tile t = tile_of(Pass::kBwd, product, head_dim, compact);
  return 4 * (2 * (t.block_m() + t.block_n) * tile_stride(head_dim) + 2 * t.block_n +
              scratch_floats(Pass::kBwd, product, t));
}

}  // namespace flash::simt
