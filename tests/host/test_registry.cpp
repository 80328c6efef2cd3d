// registry.h and the errors of api.h: what is registered runs, what is not says so.
#include "registry.h"

#include <utility>

#include "api.h"
#include "expect.h"

using namespace flash;
using flash::test::contains;
using flash::test::error_of;

namespace {

int fwd_runs = 0, bwd_runs = 0;

template <int kRow>
struct CountingKernel {
  static void fwd(const FwdParams&, Stream) { fwd_runs++; }
  static void bwd(const BwdParams&, Stream) { bwd_runs++; }
  static int64_t bwd_workspace(const BwdParams&) { return 1000 + kRow; }
};

constexpr bool belongs(const Key& key) { return key.arch == Arch::kSimt && key.dtype == kF32 && key.head_dim == 64; }

template <class Params>
Params params(int head_dim) {
  Params p;
  p.dtype = kF32;
  p.batch = p.seqlen_q = p.seqlen_k = 1;
  p.num_heads = p.num_heads_kv = 1;
  p.head_dim = p.head_dim_v = head_dim;
  return p;
}

int row_of(Pass pass, int head_dim) {
  for (int row = 0; row < kNumInstances; row++)
    if (kInstances[row].pass == pass && kInstances[row].arch == Arch::kSimt && kInstances[row].dtype == kF32 &&
        kInstances[row].head_dim == head_dim)
      return row;
  return -1;
}

void test_only_rows_that_belong() {
  for (int row = 0; row < kNumInstances; row++) {
    const Key& key = kInstances[row];
    EXPECT(is_built(row) == belongs(key), to_string(key));
    EXPECT((launchers(row).fwd != nullptr) == (belongs(key) && key.pass == Pass::kFwd), to_string(key));
    EXPECT((launchers(row).bwd != nullptr) == (belongs(key) && key.pass != Pass::kFwd), to_string(key));
  }
}

void test_run() {
  const int forward = row_of(Pass::kFwd, 64), backward = row_of(Pass::kBwd, 64);
  fwd(forward, params<FwdParams>(64), nullptr);
  bwd(backward, params<BwdParams>(40), nullptr);
  EXPECT(fwd_runs == 1 && bwd_runs == 1, fwd_runs, " ", bwd_runs);
  EXPECT(fwd_workspace(forward, params<FwdParams>(64)) == 0, "a forward without a workspace");
  EXPECT(bwd_workspace(backward, params<BwdParams>(64)) == 1000 + backward, "workspace of the row");
  EXPECT(find_row(key_of(Pass::kFwd, Arch::kSimt, params<FwdParams>(64))) == forward, "find_row");
  EXPECT(find_row(key_of(Pass::kFwd, Arch::kSimt, params<FwdParams>(100))) == -1, "a row that serves but is not built");
}

void test_errors() {
  const auto error = [](int row, int head_dim) {
    return error_of<std::invalid_argument>([&] { fwd(row, params<FwdParams>(head_dim), nullptr); });
  };
  EXPECT(contains(error(-1, 64), "not in the table"), error(-1, 64));
  EXPECT(contains(error(kNumInstances, 64), "not in the table"), error(kNumInstances, 64));
  const std::string too_large = error(row_of(Pass::kFwd, 64), 65);
  EXPECT(contains(too_large, "does not serve") && contains(too_large, "fwd simt fp32 65") &&
             contains(too_large, "\n  fwd simt fp32 128"),
         "names the call and the rows there are: ", too_large);
  EXPECT(contains(error(row_of(Pass::kFwd, 128), 100), "not in this build"), error(row_of(Pass::kFwd, 128), 100));
  EXPECT(contains(error(row_of(Pass::kBwd, 64), 64), "is no forward"), error(row_of(Pass::kBwd, 64), 64));
  FwdParams no_heads = params<FwdParams>(64), window = no_heads;
  no_heads.num_heads_kv = 0;
  window.window_left = -2;
  for (const auto& [p, words] : {std::pair(no_heads, "num_heads_kv"), std::pair(window, "window_size")}) {
    const std::string what = error_of<std::invalid_argument>([&] { fwd(row_of(Pass::kFwd, 64), p, nullptr); });
    EXPECT(contains(what, words), what);
  }
  EXPECT(contains(error_of<std::invalid_argument>([] { override_row(-1, "x.so"); }), "not in the table"), "override");
}

}  // namespace

int main() {
  const RegisterRows<belongs, CountingKernel> registered;
  test_only_rows_that_belong();
  test_run();
  test_errors();
  return flash::test::finish("registry");
}
