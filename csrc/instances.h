// THE table: every GPU kernel that exists. Dispatch, the build, the JIT, tests, bench and the README read it.
// One line is a family: the product of its lists. To add a kernel, a head dim or a variant, edit one line.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "params.h"

namespace flash {

enum class Pass : uint8_t { kFwd, kBwd, kDBias };
enum class Arch : uint8_t { kSimt, kSm80, kSm90 };
enum class Mask : uint8_t { kFull, kCausal, kLocal, kAny };  // kCausal: right 0, left unbounded; kLocal: other windows
enum class Layout : uint8_t { kDense, kPacked, kAny };
enum class Variant : uint8_t { kPlain, kGeneral, kAny };  // kGeneral: softcap, ALiBi, bias, sinks, dropout at run time

// A row of the table; also what a call asks for (then without kAny). head_dim and head_dim_v of a row are the largest
// served.
struct Key {
  Pass pass;
  Arch arch;
  DType dtype;
  int head_dim, head_dim_v;
  Mask mask;
  Layout layout;
  Variant variant;
  constexpr bool operator==(const Key&) const = default;
};

// The product of the lists, row by row; the last list varies fastest.
template <class T>
struct Choices {
  T items[8];
  int count;
  template <class... Ts>
  constexpr Choices(Ts... values) : items{values...}, count(sizeof...(Ts)) {}
};

struct HeadDims {
  int qk, v;
};

struct Family {
  Pass pass;
  Arch arch;
  Choices<DType> dtypes;
  Choices<HeadDims> dims;
  Choices<Mask> masks;
  Choices<Layout> layouts;
  Choices<Variant> variants;
  constexpr int size() const { return dtypes.count * dims.count * masks.count * layouts.count * variants.count; }
};

inline constexpr DType kF32 = DType::kF32, kF16 = DType::kF16, kBF16 = DType::kBF16, kE4M3 = DType::kE4M3;
inline constexpr HeadDims kD64{64, 64}, kD128{128, 128}, kD256{256, 256};
inline constexpr HeadDims kD96{96, 96}, kD192x128{192, 128}, kD192{192, 192};

// clang-format off
inline constexpr Family kFamilies[] = {
    // pass          arch         dtypes              head dims              mask         layout         variant
    {Pass::kFwd,   Arch::kSimt, {kF32, kF16, kBF16}, {kD64, kD128, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kAny}},
    {Pass::kBwd,   Arch::kSimt, {kF32, kF16, kBF16}, {kD64, kD128, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kAny}},
    {Pass::kDBias, Arch::kSimt, {kF32, kF16, kBF16}, {kD64, kD128, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kAny}},
    {Pass::kFwd,   Arch::kSm80, {kF16, kBF16}, {kD64, kD96, kD128, kD192x128, kD192, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kPlain}},
    {Pass::kFwd,   Arch::kSm80, {kF16, kBF16}, {kD64, kD128, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kGeneral}},
    {Pass::kBwd,   Arch::kSm80, {kF16, kBF16}, {kD64, kD96, kD128, kD192x128, kD192, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kPlain}},
    {Pass::kBwd,   Arch::kSm80, {kF16, kBF16}, {kD64, kD128, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kGeneral}},
    {Pass::kFwd,   Arch::kSm90, {kBF16, kF16}, {kD64, kD96, kD128, kD192x128, kD192, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kPlain}},
    {Pass::kFwd,   Arch::kSm90, {kBF16, kF16}, {kD64, kD128, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kGeneral}},
    {Pass::kFwd,   Arch::kSm90, {kE4M3}, {kD64, kD96, kD128, kD192, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kPlain}},
    {Pass::kFwd,   Arch::kSm90, {kE4M3}, {kD64, kD128, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kGeneral}},
    {Pass::kBwd,   Arch::kSm90, {kBF16, kF16}, {kD64, kD96, kD128, kD192x128, kD192, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kPlain}},
    {Pass::kBwd,   Arch::kSm90, {kBF16, kF16}, {kD64, kD128, kD256}, {Mask::kAny}, {Layout::kAny}, {Variant::kGeneral}},
    {Pass::kFwd,   Arch::kSm80, {kF32}, {kD64, kD128}, {Mask::kAny}, {Layout::kAny}, {Variant::kAny}},  // 3xTF32
    {Pass::kBwd,   Arch::kSm80, {kF32}, {kD64, kD128}, {Mask::kAny}, {Layout::kAny}, {Variant::kAny}},  // 3xTF32
};
// clang-format on

constexpr int count_instances() {
  int count = 0;
  for (const Family& f : kFamilies) count += f.size();
  return count;
}

inline constexpr int kNumInstances = count_instances();

constexpr std::array<Key, kNumInstances> expand_families() {
  std::array<Key, kNumInstances> rows{};
  int n = 0;
  for (const Family& f : kFamilies)
    for (int t = 0; t < f.dtypes.count; t++)
      for (int d = 0; d < f.dims.count; d++)
        for (int m = 0; m < f.masks.count; m++)
          for (int l = 0; l < f.layouts.count; l++)
            for (int x = 0; x < f.variants.count; x++)
              rows[n++] = {f.pass,
                           f.arch,
                           f.dtypes.items[t],
                           f.dims.items[d].qk,
                           f.dims.items[d].v,
                           f.masks.items[m],
                           f.layouts.items[l],
                           f.variants.items[x]};
  return rows;
}

inline constexpr std::array<Key, kNumInstances> kInstances = expand_families();

// The JIT builds one row: -DFLASH_EXT_ROW=17. Without it, every row is built.
#ifdef FLASH_EXT_ROW
constexpr bool in_this_build(int row) { return row == FLASH_EXT_ROW; }
#else
constexpr bool in_this_build(int) { return true; }
#endif

// Whether `row` of the table can run a call that asks for `call`.
constexpr bool serves(const Key& row, const Key& call) {
  return row.pass == call.pass && row.arch == call.arch && row.dtype == call.dtype && call.head_dim <= row.head_dim &&
         call.head_dim_v <= row.head_dim_v && (row.mask == Mask::kAny || row.mask == call.mask) &&
         (row.layout == Layout::kAny || row.layout == call.layout) &&
         (row.variant == Variant::kAny || row.variant == call.variant);
}

}  // namespace flash
