// wgmma: 64 x N x 16 products of a warpgroup on 16-bit operands, fp32 accumulators in registers (sm_90a).
//
// Fragments, t = thread of the warpgroup, w = t / 32, l = t % 32:
//   acc[i]   row 16w + l/4 + 8*((i/2)%2), column 8*(i/4) + 2*(l%4) + i%2     so a thread owns two rows
//   a[r]     two packed halves: row 16w + l/4 + 8*(r%2), k 2*(l%4) + {0,1} + 8*(r/2)
// hence 16 columns of an accumulator, packed in pairs, are the A operand of one k-step of the next product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash::ptx {

// Operand in shared memory: kK: the reduction dimension is contiguous; kMN: rows (or columns) of the result are.
enum class Major : int { kK = 0, kMN = 1 };

template <class T>
struct WgmmaType;
template <>
struct WgmmaType<__nv_bfloat16> {
  static constexpr char kName[] = "bf16.bf16";
};
template <>
struct WgmmaType<__half> {
  static constexpr char kName[] = "f16.f16";
};

// Orders register writes before the wgmmas that follow. Needed before the first of a batch.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Pins registers of a wgmma: the compiler may not move what computes them past this point, nor what reads them before
// it.
template <int kCount>
__device__ __forceinline__ void pin(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&r)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; i++)
    asm volatile("" : "+r"(r[i][0]), "+r"(r[i][1]), "+r"(r[i][2]), "+r"(r[i][3])::"memory");
}

// Shared-memory descriptor of a tile in the 128-byte swizzle. The tile is stored as TMA writes it: panels of 64 columns
// (128 bytes), a panel holds all rows one after the other, panels follow each other and start at multiples of 1024
// bytes.
//   K-major:  advance by 32 bytes per k-step inside a panel, then to the next panel; the leading offset is unused
//   MN-major: advance by 2048 bytes (16 rows) per k-step; the leading offset is the distance of panels
// The low word carries address and leading offset and is what advances; the high word is the same for all.
struct Descriptor {
  uint32_t low;

  __device__ __forceinline__ static Descriptor of(uint32_t address, int panel_bytes = 16) {
    return {((address & 0x3FFFF) >> 4) | (uint32_t((panel_bytes & 0x3FFFF) >> 4) << 16)};
  }
  __device__ __forceinline__ Descriptor operator+(int bytes) const { return {low + uint32_t(bytes >> 4)}; }

  // Stops the compiler from keeping every k-step's descriptor in a register of its own.
  __device__ __forceinline__ Descriptor opaque() const {
    uint32_t x = low;
    asm("" : "+r"(x));
    return {x};
  }
  __device__ __forceinline__ uint64_t bits() const {
    constexpr uint32_t kHigh =
        0x40000000u | (1024 >> 4);  // 128-byte swizzle, 1024 bytes from one group of 8 rows to the next
    uint64_t d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(kHigh));
    return d;
  }
};

// Byte offset of k-step `step` (16 deep) in a K-major tile of `rows` rows.
__device__ __forceinline__ constexpr int k_major_step(int step, int rows) {
  return (step / 4) * rows * 128 + (step % 4) * 32;
}
// The same in an MN-major tile.
__device__ __forceinline__ constexpr int mn_major_step(int step) { return step * 16 * 128; }

// The register lists of the instruction, eight at a time. Inline PTX cannot spell them from a template.
// clang-format off
#define FLASH_TEXT_1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FLASH_TEXT_2 FLASH_TEXT_1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FLASH_TEXT_3 FLASH_TEXT_2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define FLASH_TEXT_4 FLASH_TEXT_3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define FLASH_TEXT_5 FLASH_TEXT_4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FLASH_TEXT_6 FLASH_TEXT_5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FLASH_TEXT_7 FLASH_TEXT_6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FLASH_TEXT_8 FLASH_TEXT_7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define FLASH_TEXT_9 FLASH_TEXT_8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define FLASH_TEXT_10 FLASH_TEXT_9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define FLASH_TEXT_11 FLASH_TEXT_10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define FLASH_TEXT_12 FLASH_TEXT_11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define FLASH_TEXT_13 FLASH_TEXT_12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define FLASH_TEXT_14 FLASH_TEXT_13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define FLASH_TEXT_15 FLASH_TEXT_14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define FLASH_TEXT_16 FLASH_TEXT_15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define FLASH_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLASH_REGS_1 FLASH_D8(0)
#define FLASH_REGS_2 FLASH_REGS_1, FLASH_D8(8)
#define FLASH_REGS_3 FLASH_REGS_2, FLASH_D8(16)
#define FLASH_REGS_4 FLASH_REGS_3, FLASH_D8(24)
#define FLASH_REGS_5 FLASH_REGS_4, FLASH_D8(32)
#define FLASH_REGS_6 FLASH_REGS_5, FLASH_D8(40)
#define FLASH_REGS_7 FLASH_REGS_6, FLASH_D8(48)
#define FLASH_REGS_8 FLASH_REGS_7, FLASH_D8(56)
#define FLASH_REGS_9 FLASH_REGS_8, FLASH_D8(64)
#define FLASH_REGS_10 FLASH_REGS_9, FLASH_D8(72)
#define FLASH_REGS_11 FLASH_REGS_10, FLASH_D8(80)
#define FLASH_REGS_12 FLASH_REGS_11, FLASH_D8(88)
#define FLASH_REGS_13 FLASH_REGS_12, FLASH_D8(96)
#define FLASH_REGS_14 FLASH_REGS_13, FLASH_D8(104)
#define FLASH_REGS_15 FLASH_REGS_14, FLASH_D8(112)
#define FLASH_REGS_16 FLASH_REGS_15, FLASH_D8(120)

// X(e, n, numbers of the eight operands behind the n / 2 accumulators); e = n / 16
#define FLASH_EACH_N(X) \
  X(1, 16, 8, 9, 10, 11, 12, 13, 14, 15) \
  X(2, 32, 16, 17, 18, 19, 20, 21, 22, 23) \
  X(3, 48, 24, 25, 26, 27, 28, 29, 30, 31) \
  X(4, 64, 32, 33, 34, 35, 36, 37, 38, 39) \
  X(5, 80, 40, 41, 42, 43, 44, 45, 46, 47) \
  X(6, 96, 48, 49, 50, 51, 52, 53, 54, 55) \
  X(7, 112, 56, 57, 58, 59, 60, 61, 62, 63) \
  X(8, 128, 64, 65, 66, 67, 68, 69, 70, 71) \
  X(9, 144, 72, 73, 74, 75, 76, 77, 78, 79) \
  X(10, 160, 80, 81, 82, 83, 84, 85, 86, 87) \
  X(11, 176, 88, 89, 90, 91, 92, 93, 94, 95) \
  X(12, 192, 96, 97, 98, 99, 100, 101, 102, 103) \
  X(13, 208, 104, 105, 106, 107, 108, 109, 110, 111) \
  X(14, 224, 112, 113, 114, 115, 116, 117, 118, 119) \
  X(15, 240, 120, 121, 122, 123, 124, 125, 126, 127) \
  X(16, 256, 128, 129, 130, 131, 132, 133, 134, 135)
// clang-format on

// d (64 x 2 kRegs) = A B + (accumulate ? d : 0), A and B in shared memory. A is 64 x 16, B is 16 x 2 kRegs.
template <class T, Major kMajorA = Major::kK, Major kMajorB = Major::kK, int kRegs>
__device__ __forceinline__ void wgmma_ss(float (&d)[kRegs], Descriptor a, Descriptor b, bool accumulate) {
  static_assert(kRegs % 8 == 0 && kRegs <= 128, "columns: multiples of 16 up to 256");
#define FLASH_SS(e, n, A, B, P, TYPE, TA, TB, _6, _7)                                                               \
  if constexpr (kRegs == 8 * e)                                                                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n               \
                 "k16.f32.%" #TYPE " {" FLASH_TEXT_##e "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n}"       \
                 : FLASH_REGS_##e                                                                                   \
                 : "l"(a.bits()), "l"(b.bits()), "r"(int(accumulate)), "C"(WgmmaType<T>::kName), "n"(int(kMajorA)), \
                   "n"(int(kMajorB)));
  FLASH_EACH_N(FLASH_SS)
#undef FLASH_SS
}

// The same with A in registers.
template <class T, Major kMajorB = Major::kMN, int kRegs>
__device__ __forceinline__ void wgmma_rs(float (&d)[kRegs], const uint32_t (&a)[4], Descriptor b, bool accumulate) {
  static_assert(kRegs % 8 == 0 && kRegs <= 128, "columns: multiples of 16 up to 256");
#define FLASH_RS(e, n, A0, A1, A2, A3, B, P, TYPE, TB)                                                  \
  if constexpr (kRegs == 8 * e)                                                                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n   \
                 "k16.f32.%" #TYPE " {" FLASH_TEXT_##e "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B \
                                                       ", p, 1, 1, %" #TB ";\n}"                        \
                 : FLASH_REGS_##e                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(int(accumulate)),     \
                   "C"(WgmmaType<T>::kName), "n"(int(kMajorB)));
  FLASH_EACH_N(FLASH_RS)
#undef FLASH_RS
}

}  // namespace flash::ptx
