// Where the backward keeps what its kernels hand to each other, and which thread block works on what.
//
// Query rows are kept in bands of 16: the rows of one warp of an accumulator. A segment of a packed batch starts a new
// band, so that no band holds rows of two segments.
//   stats     fp32 (num_heads, bands, 2, 16): LSE and delta of the band's rows
//   dq_accum  fp32 (num_heads, bands, head_dim / 8, 32, 4): eight columns of a band lie as the 32 lanes of a warp hold
//             them, four numbers each: rows lane/4 and lane/4 + 8, columns 2*(lane%4) + {0, 1}
// and where bitwise equal results are asked for (bwd_exact_sum.h):
//   dq_accum    in units of 1 / |row_scale|, or the same as int32 (num_heads, bands, head_dim / 8, 4, 32)
//   row_scale   fp32 (num_heads, bands, 16), negative where the sums are integers
//   key_bounds  KeyBounds (num_heads_kv, key_groups): of groups of keys, anew in each segment; room for the smallest
#pragma once

#include "../attn/mask.h"
#include "../attn/seqlen.h"
#include "bwd_exact_sum.h"

namespace flash::sm90 {

inline constexpr int kBandRows = 16;
inline constexpr int kBandStats = 2 * kBandRows;  // fp32 numbers

// First band of sequence `batch_index`. In packed calls the segments before it have at most q0/16 + index bands.
FLASH_HD int64_t first_band(const AttnParams& p, const SeqInfo& s, int batch_index) {
  return p.cu_seqlens_q ? s.q0 / kBandRows + batch_index : int64_t(batch_index) * ceil_div(p.seqlen_q, kBandRows);
}

// The same for groups of keys.
FLASH_HD int64_t first_key_group(const AttnParams& p, const SeqInfo& s, int batch_index) {
  return p.cu_seqlens_k ? s.k0 / kFewestBoundsKeys + batch_index
                        : int64_t(batch_index) * ceil_div(p.seqlen_k, kFewestBoundsKeys);
}

struct BwdWorkspace {
  int64_t bands;       // of one head; a step may read the stats of a few bands behind the last one
  int64_t key_groups;  // of one head
  int64_t stats, dq_accum, row_scale, key_bounds;  // byte offsets
  int64_t bytes;

  static BwdWorkspace of(const AttnParams& p, int block_m) {
    BwdWorkspace w{};
    w.bands = p.cu_seqlens_q ? p.total_q / kBandRows + p.batch : int64_t(p.batch) * ceil_div(p.seqlen_q, kBandRows);
    w.bands += block_m / kBandRows;
    w.stats = 0;
    w.dq_accum = w.stats + p.num_heads * w.bands * kBandStats * int64_t(sizeof(float));
    w.row_scale = w.dq_accum + p.num_heads * w.bands * kBandRows * p.head_dim * int64_t(sizeof(float));
    const int64_t scales = p.deterministic ? p.num_heads * w.bands * kBandRows : 0;
    w.key_bounds = w.row_scale + scales * int64_t(sizeof(float));
    w.key_groups = p.cu_seqlens_k ? p.total_k / kFewestBoundsKeys + p.batch
                                  : int64_t(p.batch) * ceil_div(p.seqlen_k, kFewestBoundsKeys);
    w.bytes = w.key_bounds + (p.deterministic ? p.num_heads_kv * w.key_groups * int64_t(sizeof(KeyBounds)) : 0);
    return w;
  }
};

// Thread blocks of the preprocess kernel.
struct PreprocessGrid {
  int bands;  // of the longest segment
  int head_groups;
  int64_t bounds;  // blocks that bound keys: evenly among the others, for what only reads and what mostly writes run
                   // well beside each other
  FLASH_HD int64_t count(int batch) const { return bounds + int64_t(bands) * head_groups * batch; }

  // What block number `block` of `count` is: block number `index` of its kind.
  struct Role {
    bool bounds_keys;
    unsigned index;
  };
  FLASH_HD Role role(unsigned block, unsigned count) const {
    if (bounds == 0) return {false, block};
    const unsigned number = unsigned(bounds), stride = count / number, before = (block + stride - 1) / stride;
    if (block % stride == 0 && before < number) return {true, before};
    return {false, block - (before < number ? before : number)};
  }
};

// Dropout's bits of 64 keys x 64 queries: one word for each thread of a main warpgroup, made by one or two warps
// (bwd_kept.cuh). A call of the generator (attn/dropout.h) serves pairs of neighbouring keys, 8 apart, and two queries
// 8 apart. Two calls, for queries 16 apart, give a lane a byte of the words of eight threads, kept_thread(lane, warp,
// key of the pair): of the queries kept_query(lane) + {0, 8, 16, 24} or, in another byte, of those that follow these,
// and the keys kept_key(lane) + {0, 1} + 16 warp + {0, 8}.
inline constexpr int kKeptBytesOfWarpgroup = 128 * int(sizeof(uint32_t));
FLASH_HD int kept_key(int lane) { return lane / 4 % 4 * 2; }
FLASH_HD int kept_query(int lane) { return lane / 16 * 32 + lane % 4 * 2; }
FLASH_HD int kept_thread(int lane, int warp, int of_pair) {
  return 32 * warp + 4 * (kept_key(lane) + of_pair) + lane % 4;
}
FLASH_HD int kept_byte(int lane, int next_query) { return 2 * next_query + lane / 16; }
// Where entry acc[i] of a thread (bwd_scores.cuh) lies in its word: the byte, and the bit below the byte's sign.
// Entries i and i + 1, i even, have their bits in two bytes, so that the shifted word gives masks for both at once.
FLASH_HD constexpr int kept_byte(int i) { return 2 * (i % 2) + i / 16; }
FLASH_HD constexpr int kept_shift(int i) { return i / 4 % 4 * 2 + i / 2 % 2; }

// The order of the thread blocks. Blocks of one key-value head share its queries through the L2 cache, so few heads are
// visited at a time: a section. Within a section blocks with much work come first (causal: the first keys, which every
// query sees), so that the last wave is short.
struct BwdOrder {
  int n_blocks, heads;  // heads: batch * num_heads_kv
  int section;          // heads of a section

  struct Item {
    int n_block, head;
  };
  FLASH_HD Item at(int index) const {
    const int per_section = section * n_blocks;
    const int s = index / per_section, rest = index - s * per_section;
    const int size = min_of(section, heads - s * section);
    return {rest / size, s * section + rest % size};
  }
  FLASH_HD int64_t count() const { return int64_t(n_blocks) * heads; }
};

// Buffers for parts of a tile, in a ring: each step has kParts parts, one after the other.
template <int kParts_, int kPlaces_>
struct PartRing {
  static constexpr int kParts = kParts_, kPlaces = kPlaces_;
  FLASH_HD static constexpr int place(int step, int part) { return (step * kParts + part) % kPlaces; }
  // Parity of the barriers of that place, for the side that waits for the part.
  FLASH_HD static constexpr uint32_t parity(int step, int part) { return uint32_t(step * kParts + part) / kPlaces % 2; }
};

// One step of a thread block: a tile of queries of one of the heads that share its keys.
struct BwdSteps {
  int begin, count;  // tiles of queries of each head
  int group;         // heads

  struct Step {
    int m_block, head;  // head: within the group
  };
  FLASH_HD int total() const { return count * group; }
  FLASH_HD int end() const { return begin + count; }
  // `n` steps after `step`; head == group: there is none. Without a division, which would take longer than the copies.
  FLASH_HD Step ahead(Step step, int n) const {
    step.m_block += n;
    while (step.m_block >= end() && step.head < group) {
      step.m_block -= count;
      step.head++;
    }
    return step;
  }
};

}  // namespace flash::sm90
