// Every number of the sm_80 kernels: tiles, warps, pipeline stages. A tuner overrides them with -DFLASH_TUNE_<NAME>=<number>.
#pragma once

#include "../attn/host_device.h"

namespace flash::sm80 {

struct FwdTile {
  int kBlockM, kBlockN;
  int kRowTiles;     // 16-row tiles of a warp: two share every K and V fragment that is read from shared memory
  int kBlocksPerSm;  // asked of the register allocator
  bool kQInRegs;     // Q's fragments stay in registers
  constexpr int warps() const { return kBlockM / (16 * kRowTiles); }
  constexpr int threads() const { return 32 * warps(); }
};

// sQ | one or two stages of (sK | sV)
constexpr int fwd_smem_bytes(const FwdTile& t, int head_dim, int head_dim_v, int stages) {
  return 2 * (t.kBlockM * head_dim + stages * t.kBlockN * (head_dim + head_dim_v));
}

// Shared memory bounds the products (128 bytes per clock), so a warp owns 32 rows wherever its registers hold them: out
// needs head_dim_v of them, the scores kBlockN. Two blocks fit a multiprocessor of 163 or 227 KiB and hide each other's softmax
// and loads; one fits 99 KiB.
constexpr FwdTile fwd_tile(int head_dim, int head_dim_v) {
  FwdTile t = head_dim <= 64    ? FwdTile{128, 64, 2, 2, true}
              : head_dim <= 96  ? FwdTile{128, 64, 2, 2, false}
              : head_dim <= 128 ? FwdTile{128, 64, 2, 2, false}
              : head_dim_v <= 128 ? FwdTile{128, 32, 2, 2, false}
              // out alone would fill the registers of 32 rows: 16, and Q in registers to spare shared memory
              : head_dim <= 192 ? FwdTile{64, 32, 1, 2, true}
                                : FwdTile{64, 32, 1, 2, true};
#ifdef FLASH_TUNE_BLOCK_M
  t.kBlockM = FLASH_TUNE_BLOCK_M;
#endif
#ifdef FLASH_TUNE_BLOCK_N
  t.kBlockN = FLASH_TUNE_BLOCK_N;
#endif
#ifdef FLASH_TUNE_ROW_TILES
  t.kRowTiles = FLASH_TUNE_ROW_TILES;
#endif
#ifdef FLASH_TUNE_BLOCKS_PER_SM
  t.kBlocksPerSm = FLASH_TUNE_BLOCKS_PER_SM;
#endif
#ifdef FLASH_TUNE_Q_IN_REGS
  t.kQInRegs = FLASH_TUNE_Q_IN_REGS != 0;
#endif
  return t;
}

// What a backward block accumulates. Where the registers of a warp cannot hold both dk and dv of 16 keys, dv and dk (with dq)
// are two launches that share nothing but the scores.
enum class BwdPart { kBoth, kValues, kKeys };
constexpr bool splits(int head_dim, int head_dim_v) { return head_dim + head_dim_v > 320; }

struct BwdTile {
  int kBlockM;       // queries that pass through at a time
  int kSubM;         // of which the scores are in registers
  int kRowTiles;     // 16-key tiles of a warp
  int kWarps;        // along keys: kBlockN = 16 * kRowTiles * kWarps
  int kBlocksPerSm;  // asked of the register allocator
  bool kVInRegs;     // V's fragments stay in registers
  constexpr int block_n() const { return 16 * kRowTiles * kWarps; }
  constexpr int threads() const { return 32 * kWarps; }
};

// A warp owns keys: P^T and dS^T leave one product in registers as the operand of the next, and only dS goes through shared
// memory, for dq.
constexpr BwdTile bwd_tile(int head_dim, int head_dim_v) {
  BwdTile t = head_dim <= 64    ? BwdTile{64, 32, 2, 4, 2, false}
              : head_dim <= 128 ? BwdTile{64, 32, 1, 4, 2, false}
                                : BwdTile{32, 32, 1, 4, 2, false};
#ifdef FLASH_TUNE_BLOCK_M
  t.kBlockM = FLASH_TUNE_BLOCK_M;
#endif
#ifdef FLASH_TUNE_SUB_M
  t.kSubM = FLASH_TUNE_SUB_M;
#endif
#ifdef FLASH_TUNE_ROW_TILES
  t.kRowTiles = FLASH_TUNE_ROW_TILES;
#endif
#ifdef FLASH_TUNE_WARPS
  t.kWarps = FLASH_TUNE_WARPS;
#endif
#ifdef FLASH_TUNE_BLOCKS_PER_SM
  t.kBlocksPerSm = FLASH_TUNE_BLOCKS_PER_SM;
#endif
#ifdef FLASH_TUNE_V_IN_REGS
  t.kVInRegs = FLASH_TUNE_V_IN_REGS != 0;
#endif
  return t;
}

// sK | sV, if dk needs it there | two sDs, if dk | one or two stages of (sQ | sDo | lse | delta)
struct BwdSmem {
  int v, ds, stage, stage_bytes;  // where each begins; sK at 0
  constexpr int bytes(int stages) const { return stage + stages * stage_bytes; }
};

constexpr BwdSmem bwd_smem(const BwdTile& t, int head_dim, int head_dim_v, BwdPart part) {
  const bool dk = part != BwdPart::kValues, v_stays = dk && !t.kVInRegs;
  BwdSmem s{};
  s.v = 2 * t.block_n() * head_dim;  // with V in registers it is read through the first sDs
  s.ds = s.v + (v_stays ? 2 * t.block_n() * head_dim_v : 0);
  s.stage = s.ds + (dk ? 2 * 2 * t.block_n() * t.kBlockM : 0);
  s.stage_bytes = 2 * t.kBlockM * (head_dim + head_dim_v) + 2 * 4 * t.kBlockM;
  return s;
}

// Shared memory of a device, in bytes; each block also costs kReserved.
struct SharedMemory {
  int per_block, per_sm;
  static constexpr int kReserved = 1024;
};
inline constexpr SharedMemory kSharedMemorySm80{163 * 1024, 164 * 1024}, kSharedMemorySm86{99 * 1024, 100 * 1024},
    kSharedMemorySm90{227 * 1024, 228 * 1024};  // sm_89 and sm_120 are like sm_86, sm_100 like sm_90

constexpr bool fits(const SharedMemory& memory, int blocks, int bytes) {
  return bytes <= memory.per_block && blocks * (bytes + SharedMemory::kReserved) <= memory.per_sm;
}

// Two pipeline stages or one. More blocks on a multiprocessor hide more than a second stage does; where as many blocks fit
// with two stages, two.
constexpr int choose_stages(const SharedMemory& memory, int blocks_per_sm, int bytes_of_two, int bytes_of_one) {
  for (int blocks = blocks_per_sm; blocks > 0; blocks--) {
    if (fits(memory, blocks, bytes_of_two)) return 2;
    if (fits(memory, blocks, bytes_of_one)) return 1;
  }
  return 0;
}

}  // namespace flash::sm80
