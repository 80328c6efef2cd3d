// instances.h: the table as a whole, and which row a call gets.
#include "instances.h"

#include <set>

#include "api.h"
#include "expect.h"

using namespace flash;

namespace {

// Registered by nothing but this test: every row counts as built.
void pretend_all_rows_are_built() {
  for (int row = 0; row < kNumInstances; row++) {
    if (kInstances[row].pass == Pass::kFwd)
      launchers(row).fwd = [](const FwdParams&, Stream) {};
    else
      launchers(row).bwd = [](const BwdParams&, Stream) {};
  }
}

void test_rows() {
  std::set<std::string> names;
  for (const Key& row : kInstances) {
    EXPECT(names.insert(to_string(row)).second, "twice in the table: ", to_string(row));
    EXPECT(row.head_dim > 0 && row.head_dim_v > 0, to_string(row));
    EXPECT(row.head_dim % 8 == 0 && row.head_dim_v % 8 == 0, to_string(row), ": tiles are rows of 16 bytes");
  }
}

void test_serves() {
  const Key row{Pass::kFwd, Arch::kSm90, kBF16, 128, 64, Mask::kCausal, Layout::kAny, Variant::kPlain};
  Key call{Pass::kFwd, Arch::kSm90, kBF16, 100, 64, Mask::kCausal, Layout::kPacked, Variant::kPlain};
  EXPECT(serves(row, call), "smaller head_dim, any layout");
  const auto with = [&](auto change) {
    Key other = call;
    change(other);
    return serves(row, other);
  };
  EXPECT(!with([](Key& k) { k.pass = Pass::kBwd; }), "pass");
  EXPECT(!with([](Key& k) { k.arch = Arch::kSm80; }), "arch");
  EXPECT(!with([](Key& k) { k.dtype = kF16; }), "dtype");
  EXPECT(!with([](Key& k) { k.head_dim = 129; }), "head_dim");
  EXPECT(!with([](Key& k) { k.head_dim_v = 65; }), "head_dim_v");
  EXPECT(!with([](Key& k) { k.mask = Mask::kLocal; }), "mask");
  EXPECT(!with([](Key& k) { k.variant = Variant::kGeneral; }), "variant");
}

// The row found serves the call, and no other row would with less padding.
void test_find_row() {
  for (Pass pass : {Pass::kFwd, Pass::kBwd, Pass::kDBias})
    for (Arch arch : {Arch::kSimt, Arch::kSm80, Arch::kSm90})
      for (DType dtype : {kF32, kF16, kBF16, DType::kE4M3})
        for (Mask mask : {Mask::kFull, Mask::kCausal, Mask::kLocal})
          for (Layout layout : {Layout::kDense, Layout::kPacked})
            for (Variant variant : {Variant::kPlain, Variant::kGeneral})
              for (int head_dim : {1, 32, 64, 65, 96, 128, 129, 160, 192, 200, 256, 257})
                for (int head_dim_v : {32, 64, 128, 192, 256}) {
                  const Key call{pass, arch, dtype, head_dim, head_dim_v, mask, layout, variant};
                  const int found = find_row(call);
                  EXPECT(found == -1 || serves(kInstances[found], call), to_string(call));
                  for (int row = 0; row < kNumInstances; row++) {
                    const Key& other = kInstances[row];
                    if (!serves(other, call)) continue;
                    EXPECT(found >= 0, to_string(call), " is served by ", to_string(other));
                    if (found < 0) continue;
                    const Key& got = kInstances[found];
                    const bool smaller = other.head_dim <= got.head_dim && other.head_dim_v <= got.head_dim_v &&
                                         (other.head_dim < got.head_dim || other.head_dim_v < got.head_dim_v);
                    EXPECT(!smaller, to_string(call), " got ", to_string(got), " instead of ", to_string(other));
                  }
                }
}

void test_key_of() {
  AttnParams p;
  p.dtype = kBF16, p.head_dim = 64, p.head_dim_v = 32;
  const auto key = [&] { return key_of(Pass::kFwd, Arch::kSm90, p); };
  EXPECT(to_string(key()) == "fwd sm90 bf16 64/32 full dense plain", to_string(key()));
  p.window_right = 0;
  EXPECT(key().mask == Mask::kCausal, "right 0, left unbounded");
  p.window_left = 5;
  EXPECT(key().mask == Mask::kLocal, "both bounds");
  p.window_left = -1, p.window_right = 3;
  EXPECT(key().mask == Mask::kLocal, "right 3");
  const int32_t cu[] = {0, 1};
  p.cu_seqlens_k = cu;
  EXPECT(key().layout == Layout::kPacked, "packed keys");
  p.softcap = 1.f;
  EXPECT(key().variant == Variant::kGeneral, "softcap");
}

}  // namespace

int main() {
  pretend_all_rows_are_built();
  test_rows();
  test_serves();
  test_find_row();
  test_key_of();
  return flash::test::finish("instances");
}
