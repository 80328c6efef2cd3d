// The workspace of a backward: fp32 sums that blocks add to and, for deterministic, whose turn it is. All zero at
// first.
#pragma once

#include "bwd_traits.cuh"

namespace flash::sm80 {

template <class Traits>
struct BwdWorkspace {
  using QueryTiles = TileIndex<Traits::kBlockM>;
  using KeyTiles = TileIndex<Traits::kBlockN>;
  static constexpr int kDqFloats = Traits::DqPieces::kFloats;
  static constexpr int kDkFloats = Traits::kBlockN * Traits::kHeadDim, kDvFloats = Traits::kBlockN * Traits::kHeadDimV;
  static constexpr int kWarps = Traits::kTile.warps();

  const BwdParams& p;

  FLASH_HD int splits() const { return head_splits(p, Traits::kBlockN); }
  FLASH_HD int64_t dq_tiles() const { return QueryTiles::of_queries(p).count() * p.num_heads; }
  // Only where blocks share a tile of keys.
  FLASH_HD int64_t key_tiles() const { return splits() > 1 ? KeyTiles::of_keys(p).count() * p.num_heads_kv : 0; }

  // Where each begins, in words of four bytes. What every step needs depends neither on the number of key tiles nor on
  // how many blocks share one, which takes a loop of divisions.
  // dq (dq_tiles, kDqFloats) lies at 0; one counter follows.
  FLASH_HD int64_t started() const { return dq_tiles() * kDqFloats; }
  FLASH_HD int64_t dq_turns() const { return started() + 1; }  // (dq_tiles, kWarps)
  FLASH_HD int64_t key_sums() const {  // (key_tiles, kDkFloats + kDvFloats), to be added to by vector
    return p.deterministic ? (dq_turns() + dq_tiles() * kWarps + 3) / 4 * 4 : started();
  }
  // (key_tiles, kWarps)
  FLASH_HD int64_t key_turns() const { return key_sums() + key_tiles() * (kDkFloats + kDvFloats); }
  FLASH_HD int64_t bytes() const { return 4 * (key_turns() + (p.deterministic ? key_tiles() * kWarps : 0)); }

  // Tile `tile` of kBlockM queries (kBlockN keys) of a sequence.
  __device__ int64_t dq_tile(int batch_index, const SeqInfo& seq, int head, int tile) const {
    return QueryTiles::of_queries(p).index(batch_index, seq.q0, tile) * p.num_heads + head;
  }
  __device__ int64_t key_tile(int batch_index, const SeqInfo& seq, int head_kv, int tile) const {
    return KeyTiles::of_keys(p).index(batch_index, seq.k0, tile) * p.num_heads_kv + head_kv;
  }
  __device__ float* dq_sums(int64_t dq_tile) const { return floats() + dq_tile * kDqFloats; }
  __device__ float* dk_sums(int64_t key_tile) const {
    return floats() + key_sums() + key_tile * (kDkFloats + kDvFloats);
  }
  __device__ float* dv_sums(int64_t key_tile) const { return dk_sums(key_tile) + kDkFloats; }
  __device__ uint32_t* started_blocks() const { return words() + started(); }
  __device__ uint32_t* dq_turn(int64_t dq_tile, int warp) const {
    return words() + dq_turns() + dq_tile * kWarps + warp;
  }
  __device__ uint32_t* key_turn(int64_t key_tile, int warp) const {
    return words() + key_turns() + key_tile * kWarps + warp;
  }

 private:
  __device__ float* floats() const { return static_cast<float*>(p.workspace); }
  __device__ uint32_t* words() const { return static_cast<uint32_t*>(p.workspace); }
};

}  // namespace flash::sm80
