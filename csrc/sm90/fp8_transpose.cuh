// V -> V^T in tiles (fp8_layout.h): 8-bit wgmma takes both operands with the reduction dimension contiguous. Each tile
// is needed by all tiles of queries of its heads, so warps that have nothing else to do turn it around once, in the
// order of need, through memory that stays in the L2 cache; the producers wait for what is not ready yet.
#pragma once

#include "fp8_turn.cuh"
#include "fp8_unit_loader.cuh"

namespace flash::sm90 {

// A warp that turns units around until none is left.
template <class Traits>
class Fp8Transposer : Fp8UnitLoader<Traits> {
 public:
  using Fp8UnitLoader<Traits>::Fp8UnitLoader;

  __device__ __forceinline__ void run() {
    int stage = 0;
#pragma unroll 1
    for (int loaded = 1;; loaded++) {
      Units::load();
      if (loaded < Smem::kRawStages) continue;
      ptx::cp_async_wait_group<Smem::kRawStages - 1>();
      __syncwarp();
      const ValueUnit unit = smem.unit(turner, stage);
      if (unit.tile < 0) break;
      const int columns = columns_of<Traits>(unit);
      turn_values(smem.raw(turner, stage), smem.turned(turner), columns);
      __syncwarp();
      store_unit(place_of<Traits>(args, unit), smem.base + Smem::kTurned + turner * Smem::kRawBytes,
                 columns * kUnitKeys);
      __syncwarp();
      if (lane == 0 && (unit.part + 1) % Traits::kJobUnits == 0) report_job(counters, unit.tile);
      if (++stage == Smem::kRawStages) stage = 0;
    }
    counters.template finish<Traits>();
  }

 private:
  using Units = Fp8UnitLoader<Traits>;
  using typename Units::Smem;
  using Units::args, Units::counters, Units::smem, Units::turner, Units::lane;
};

}  // namespace flash::sm90
