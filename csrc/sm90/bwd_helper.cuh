// A warp of the producer warpgroup that helps the main warpgroups with 64 of their keys: it makes dropout's bits for
// the steps to come, and adds dS to the gradient of the bias, from the tile that the dQ warpgroup reads.
#pragma once

#include "../ptx/griddep.cuh"
#include "../ptx/red.cuh"
#include "bwd_kept.cuh"
#include "bwd_scores.cuh"

namespace flash::sm90 {

struct HelperTasks {
  bool makes_bits, adds_dbias;

  template <class Traits>
  __device__ __forceinline__ static HelperTasks of(const BwdParams& p) {
    return {Traits::kMayDrop && p.dropout_p != 0.f, Traits::kMayBias && p.dbias.ptr != nullptr};
  }
  __device__ __forceinline__ bool any() const { return makes_bits || adds_dbias; }
};

// Adds the tile `ds` of 64 queries x 64 keys (transposed_address has its layout) to the gradient of the bias. A lane
// has four keys of every other query. Numbers that lie aligned are added four at a time.
template <class T>
__device__ __forceinline__ void add_to_dbias(const Bias& dbias, uint32_t ds, int64_t at, int queries, int keys) {
  const int lane = threadIdx.x % 32, first = lane / 16, column = lane % 16 * 4;
  float* dst = static_cast<float*>(const_cast<void*>(dbias.ptr)) + at + first * dbias.row + column;
  const bool is_aligned = ((dbias.batch | dbias.head | dbias.row) & 3) == 0;
#pragma unroll 2
  for (int query = first; query < 64; query += 2, dst += 2 * dbias.row) {
    uint32_t pair[2];
    const uint32_t address = ds + query * 128 + ((column / 8) ^ (query % 8)) * 16 + column % 8 * 2;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(pair[0]), "=r"(pair[1]) : "r"(address));
    const float2 x = unpack2<T>(pair[0]), y = unpack2<T>(pair[1]);
    if (query >= queries || column >= keys) continue;
    if (is_aligned) {
      ptx::red_add_v4(dst, x.x, x.y, y.x, y.y);
    } else {
      ptx::red_add(dst, x.x);
      if (column + 1 < keys) ptx::red_add(dst + 1, x.y);
      if (column + 2 < keys) ptx::red_add(dst + 2, y.x);
      if (column + 3 < keys) ptx::red_add(dst + 3, y.y);
    }
  }
}

// `Place` says where the keys' buffers and barriers are, and which they are: those of which dS is added, those for
// which it makes bits, and its part of them.
template <class Traits, class Place>
__device__ __forceinline__ void run_helper(const BwdArgs& args, Place place, uint8_t* shared) {
  constexpr int kStages = Traits::kStages, kDsStages = Traits::kDsStages, kBlockM = Traits::kBlockM;
  ptx::griddepcontrol_wait();  // for rng_state
  const BwdParams& p = args.p;
  const HelperTasks tasks = HelperTasks::of<Traits>(p);
  const Dropout dropout = tasks.makes_bits ? Dropout::of(p.dropout_p, p.rng_state) : Dropout{};
  const bool is_first_lane = threadIdx.x % 32 == 0;
  int index = 0;  // of the step whose bits are made; dS of the step before it is added after that
#pragma unroll 1
  for (int tile = 0;; tile++) {
    const BwdBlock& block = wait_for_tile(place.smem, shared, tile);
    if (block.empty) break;
    const int end = index + block.steps.total(), head0 = block.head_kv * block.steps.group;
    const int first_key = place.first_key(block, place.half);
    const BlockRange& mine = block.mine[place.half];
    BwdSteps::Step next{block.steps.begin, 0}, last = next;
#pragma unroll 1
    for (bool is_first = true; index <= end; index++, is_first = false) {
      if (tasks.makes_bits && index < end) {
        const int stage = index % kStages;
        ptx::mbarrier_wait(place.empty(stage), phase_of<kStages>(index) ^ 1);
        write_kept_bits<Place::kParts>(place.kept(stage), dropout, block.batch * p.num_heads + head0 + next.head,
                                       place.first_key(block, place.bits_half), next.m_block * kBlockM, place.part);
        __syncwarp();
        if (is_first_lane) ptx::mbarrier_arrive(place.full(stage));
      }
      if (tasks.adds_dbias && !is_first) {
        const int slot = (index - 1) % kDsStages;
        ptx::mbarrier_wait(place.ds_full(slot), phase_of<kDsStages>(index - 1));
        const int query = last.m_block * kBlockM;
        if (last.m_block >= mine.begin && last.m_block < mine.end)
          add_to_dbias<typename Traits::T>(
              p.dbias, place.ds(slot),
              block.batch * p.dbias.batch + (head0 + last.head) * p.dbias.head + query * p.dbias.row + first_key,
              block.seq.seqlen_q - query, block.seq.seqlen_k - first_key);
        ptx::fence_proxy_async();  // a pair's slot is filled by the copy engine next
        __syncwarp();
        if (is_first_lane) ptx::mbarrier_arrive(place.ds_empty(slot));
      }
      last = next;
      next = block.steps.ahead(next, 1);
    }
    index = end;
    __syncwarp();  // every lane has read the tile
    if (is_first_lane) ptx::mbarrier_arrive(place.smem.tile_empty(tile));
  }
}

}  // namespace flash::sm90
