// attn/seqlen.h: where sequences lie, and that no cu_seqlens, however wrong, leads outside the memory there is.
#include "attn/seqlen.h"

#include "expect.h"

using namespace flash;

namespace {

void test_dense() {
  AttnParams p;
  p.batch = 3, p.seqlen_q = 5, p.seqlen_k = 7, p.total_q = 15, p.total_k = 21;
  for (int b = 0; b < p.batch; b++) {
    const SeqInfo s = SeqInfo::of(p, b);
    EXPECT(s.q0 == 0 && s.k0 == 0 && s.seqlen_q == 5 && s.seqlen_k == 7, "batch ", b);
    EXPECT(SeqInfo::rows_of_k(p, b) == 7, "batch ", b);
  }
}

void test_seqused() {
  AttnParams p;
  const int32_t used[] = {0, 3, 7, 9, -2}, expected[] = {0, 3, 7, 7, 0};
  p.batch = 5, p.seqlen_q = 1, p.seqlen_k = 7, p.total_k = 35, p.seqused_k = used;
  for (int b = 0; b < p.batch; b++) {
    EXPECT(SeqInfo::of(p, b).seqlen_k == expected[b], "batch ", b, ": ", SeqInfo::of(p, b).seqlen_k);
    EXPECT(SeqInfo::rows_of_k(p, b) == 7, "used or not, the rows exist");
  }
}

// Every cu_seqlens of two segments with entries -1 ... 7 over memory of 5 rows.
void test_packed_stays_in_memory() {
  for (int a = -1; a <= 7; a++)
    for (int b = -1; b <= 7; b++)
      for (int c = -1; c <= 7; c++)
        for (int longest = 0; longest <= 6; longest++) {
          const int32_t cu[] = {a, b, c};
          AttnParams p;
          p.batch = 2, p.seqlen_q = p.seqlen_k = longest, p.total_q = p.total_k = 5;
          p.cu_seqlens_q = p.cu_seqlens_k = cu;
          for (int i = 0; i < 2; i++) {
            const SeqInfo s = SeqInfo::of(p, i);
            EXPECT(s.q0 >= 0 && s.seqlen_q >= 0 && s.q0 + s.seqlen_q <= 5, a, " ", b, " ", c, " longest ", longest);
            EXPECT(s.k0 == s.q0 && s.seqlen_k == s.seqlen_q, "q and k alike");
            const bool sane = 0 <= cu[i] && cu[i] <= cu[i + 1] && cu[i + 1] <= 5 && cu[i + 1] - cu[i] <= longest;
            EXPECT(!sane || (s.q0 == cu[i] && s.seqlen_q == cu[i + 1] - cu[i]), a, " ", b, " ", c);
            EXPECT(SeqInfo::rows_of_k(p, i) == s.seqlen_k, "no seqused_k");
          }
        }
}

void test_offsets_pass_2_31() {
  const Strided t{nullptr, int64_t(1) << 33, int64_t(1) << 20, 128};
  EXPECT(offset_of(t, 3, 5, 4000, 2) == 3 * (int64_t(1) << 33) + 4005 * (int64_t(1) << 20) + 256, "64-bit");
  const RowStats r{nullptr, int64_t(1) << 32, int64_t(1) << 31};
  EXPECT(offset_of(r, 2, 7, 9, 3) == (int64_t(1) << 33) + 3 * (int64_t(1) << 31) + 16, "64-bit");
}

}  // namespace

int main() {
  test_dense();
  test_seqused();
  test_packed_stays_in_memory();
  test_offsets_pass_2_31();
  return flash::test::finish("seqlen");
}
