// Which of the options that general variants serve a call uses. Each option alone has code of its own, a
// loop of the forward's kernel up to head_dim 128 and a kernel of the backward, and there is one for all together:
// jumps over the code of the others cost the forward 2 to 12 % at head_dim 64.
#pragma once

#include "../ptx/tensor_map.h"

namespace flash::sm90 {

enum class Option : uint8_t { kAny, kSoftcap, kAlibi, kBias, kDropout };  // kBias: by the copy engine
inline constexpr int kNumOptions = 5;

// Whether code for the option `of` has to do with `option`.
constexpr bool may_have(Option of, Option option) { return of == Option::kAny || of == option; }

inline Strided strided(const Bias& b) { return {const_cast<void*>(b.ptr), b.batch, b.row, b.head}; }

// Whether the copy engine can bring the bias: 16-bit numbers, contiguous along the keys. One row for all queries takes
// a reader that knows about it.
inline bool can_copy_bias(const AttnParams& p, bool knows_one_row = false) {
  return p.bias.ptr != nullptr && !p.bias.is_f32 && p.bias.col == 1 &&
         (p.bias.row != 0 || p.seqlen_q == 1 || knows_one_row) && ptx::tma_can_read(strided(p.bias), 2);
}

// For copies of 64 queries, or their one row, x 64 keys. A packed call has one bias per segment.
inline CUtensorMap bias_map(const AttnParams& p, bool one_row = false) {
  return ptx::tensor_map(strided(p.bias), {one_row ? 1 : p.seqlen_q, p.num_heads, p.batch, p.seqlen_k}, p.dtype,
                         one_row ? 1 : 64, "attn_bias");
}

// The call's only option, if there is a loop for it.
inline Option option_of(const AttnParams& p, bool copies_bias) {
  const bool has[] = {p.softcap != 0.f, p.alibi_slopes != nullptr, p.bias.ptr != nullptr, p.dropout_p != 0.f};
  if (has[0] + has[1] + has[2] + has[3] != 1 || !(p.softmax_scale > 0.f)) return Option::kAny;
  if (has[2]) return copies_bias ? Option::kBias : Option::kAny;
  return has[0] ? Option::kSoftcap : has[1] ? Option::kAlibi : Option::kDropout;
}

}  // namespace flash::sm90
