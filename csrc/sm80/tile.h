// Every number of the sm_80 kernels: tiles, warps, pipeline stages.
#pragma once

#include "../attn/host_device.h"
#include "../attn/shared_memory.h"
#include "../attn/tune.h"

namespace flash::sm80 {

struct FwdTile {
  int kBlockM, kBlockN;
  int kRowTiles;     // 16-row tiles of a warp: two share every K and V fragment that is read from shared memory
  int kBlocksPerSm;  // asked of the register allocator
  bool kQInRegs;     // Q's fragments stay in registers
  int kColWarps;     // warps with the same rows: they divide the keys of the scores, the columns of out
  constexpr int warps() const { return kBlockM / (16 * kRowTiles) * kColWarps; }
  constexpr int threads() const { return 32 * warps(); }
};

// sQ | two stages of (sK | sV) | what the loop has no registers for: where the block is, which keys each warp sees,
// what a general variant does to scores, each warp's references of the rows | for pairs of warps: numbers of their rows
// and P, which they exchange, barriers
struct FwdSmem {
  int kv, place, warps, general, references, numbers, p, barriers, bytes;  // where each begins, sQ at 0, and the end
};

constexpr FwdSmem fwd_smem(const FwdTile& t, int head_dim, int head_dim_v) {
  FwdSmem s{};
  s.kv = 2 * t.kBlockM * head_dim;
  s.place = s.kv + 2 * 2 * t.kBlockN * (head_dim + head_dim_v);
  s.warps = s.place + 96;
  s.general = s.warps + 32 * t.warps();
  s.references = s.general + 192;
  s.numbers = s.references + 4 * t.kBlockM * t.kColWarps;
  s.p = s.numbers + (t.kColWarps > 1 ? 4 * t.kBlockM * t.kColWarps : 0);
  s.barriers = s.p + (t.kColWarps > 1 ? 2 * t.kBlockM * t.kBlockN : 0);
  s.bytes = s.barriers + (t.kColWarps > 1 ? 32 : 0);
  return s;
}

// Shared memory bounds the products (128 bytes per clock), so a warp owns 32 rows wherever its registers hold them: out
// needs head_dim_v of them, the scores kBlockN. Two blocks on a multiprocessor hide each other's softmax and barriers;
// at head_dim 256 eight warps of one block halve the copies instead, and pairs of them share 32 rows.
// small: for 99 KiB of shared memory, where the other does not fit.
constexpr FwdTile fwd_tile(int head_dim, int head_dim_v, bool small = false) {
  FwdTile t = head_dim <= 64      ? FwdTile{128, 64, 2, 2, true, 1}
              : head_dim <= 128   ? FwdTile{128, 64, 2, 2, false, 1}
              : head_dim_v <= 128 ? FwdTile{128, 32, 2, 2, false, 1}
              : small             ? FwdTile{64, 32, 1, 2, false, 1}
              : head_dim_v <= 192 ? FwdTile{128, 64, 1, 1, false, 1}
                                  : FwdTile{128, 64, 2, 1, false, 2};
  FLASH_TUNE_FWD;
  return t;
}

struct BwdTile {
  int kBlockM, kBlockN;  // queries that pass through at a time, keys of the block
  int kRowTiles;         // 16-key tiles of a warp
  int kColWarps;         // warps with the same keys: they divide the queries of the scores, the columns of dk and dv
  int kSubM;             // queries whose scores a warp has in registers
  int kDqCols;           // columns of dq that a warp has in registers: the fewer, the more often it reads dS
  int kBlocksPerSm;      // asked of the register allocator
  FLASH_HD constexpr int key_warps() const { return kBlockN / (16 * kRowTiles); }
  FLASH_HD constexpr int warps() const { return key_warps() * kColWarps; }
  constexpr int threads() const { return 32 * warps(); }
  // P and dS pass through shared memory; else only dS, for dq.
  constexpr bool shares_p() const { return kColWarps > 1; }
};

// A warp of 32 keys reads every fragment of q and dout for two products. Its dk and dv fill its registers at head_dim
// 64, and P^T and dS^T then leave one product in registers as the operand of the next; beyond, warps share keys and
// divide the columns. small: for 99 KiB of shared memory, where the other does not fit.
constexpr BwdTile bwd_tile(int head_dim, int head_dim_v, bool small = false) {
  BwdTile t = head_dim <= 64    ? BwdTile{64, 128, 2, 1, 32, 32, 2}
              : head_dim <= 96  ? BwdTile{64, 64, 2, 2, 32, 48, 2}
              : head_dim <= 128 ? (small ? BwdTile{64, 64, 2, 2, 32, 32, 1} : BwdTile{64, 128, 2, 2, 32, 32, 1})
              : head_dim <= 192 ? (small ? BwdTile{32, 32, 1, 2, 16, 48, 1} : BwdTile{64, 64, 2, 4, 16, 48, 1})
                                : (small ? BwdTile{32, 32, 1, 2, 16, 32, 1} : BwdTile{64, 64, 2, 4, 16, 64, 1});
  FLASH_TUNE_BWD;
  return t;
}

// sK | sV | sP and sDs, or two sDs | barriers | where the block is | one or two stages of (sQ | sDo | lse | delta)
struct BwdSmem {
  int v, ds, ds_bytes, barriers, place, stage, stage_bytes;  // where each begins, sK at 0; sP lies behind sDs
  constexpr int bytes(int stages) const { return stage + stages * stage_bytes; }
};

constexpr BwdSmem bwd_smem(const BwdTile& t, int head_dim, int head_dim_v) {
  BwdSmem s{};
  s.v = 2 * t.kBlockN * head_dim;
  s.ds = s.v + 2 * t.kBlockN * head_dim_v;
  s.ds_bytes = 2 * t.kBlockN * t.kBlockM;
  s.barriers = s.ds + 2 * s.ds_bytes;
  s.place = s.barriers + 64;
  s.stage = s.barriers + 128;  // tiles start at multiples of 128 bytes
  s.stage_bytes = 2 * t.kBlockM * (head_dim + head_dim_v) + 2 * 4 * t.kBlockM;
  return s;
}

// Two pipeline stages or one. More blocks on a multiprocessor hide more than a second stage does; where as many blocks
// fit with two stages, two.
constexpr int choose_stages(const SharedMemory& memory, int blocks_per_sm, int bytes_of_two, int bytes_of_one) {
  for (int blocks = blocks_per_sm; blocks > 0; blocks--) {
    if (fits(memory, blocks, bytes_of_two)) return 2;
    if (fits(memory, blocks, bytes_of_one)) return 1;
  }
  return 0;
}

}  // namespace flash::sm80
