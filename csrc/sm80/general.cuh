// What the general variants add: softcap, ALiBi, bias and dropout, switched at run time, for one tile of scores.
#pragma once

#include "../attn/dropout.h"
#include "../attn/mask.h"
#include "../attn/numeric.cuh"
#include "../attn/score.h"

namespace flash::sm80 {

struct Softcapped {
  float score, slope;  // d score / d (q.k * softmax_scale)

  __device__ __forceinline__ static Softcapped exact(const ScoreMod& mod, float qk) {
    return {mod.softcap * tanhf(qk * mod.softmax_scale / mod.softcap), mod.derivative(qk)};
  }
  // tanh comes from an exponential, to about 3e-7: up to kLargestFast an error far below what 16 bits of q and k leave.
  static constexpr float kLargestFast = 64.f;
  __device__ __forceinline__ static Softcapped fast(const ScoreMod& mod, float qk) {
    const float x = qk * (mod.softmax_scale / mod.softcap);
    const float rest = __fdividef(2.f, 1.f + exp2_approx(2.f * kLog2e * fabsf(x)));  // 1 - tanh(|x|)
    return {copysignf(mod.softcap - mod.softcap * rest, x), rest * (2.f - rest)};
  }
};

template <class T>
class General {
 public:
  __device__ General(const AttnParams& p, const Band& band, int batch_index, int head)
      : mod_(ScoreMod::of(p, batch_index, head)), band_(band), bias_(p.bias), dropout_{}, drops_(p.dropout_p != 0.f) {
    bias_offset_ = batch_index * p.bias.batch + head * p.bias.head;
    head_index_ = uint32_t(batch_index) * p.num_heads + head;
    if (drops_) dropout_ = Dropout::of(p.dropout_p, p.rng_state);
  }

  // Scale, softcap and ALiBi.
  __device__ __forceinline__ const ScoreMod& mod() const { return mod_; }

  __device__ __forceinline__ bool drops() const { return drops_; }
  __device__ __forceinline__ float keep_scale() const { return drops_ ? dropout_.scale : 1.f; }
  // The random bits of the lane's columns in the 64 that hold `col`, for `row` and the one that differs in bit 3.
  __device__ __forceinline__ Philox draw(int row, int col) const { return dropout_.draw(head_index_, row, col); }
  // The highest bit: whether column col is kept.
  __device__ __forceinline__ uint32_t kept_sign(const Philox& random, int row, int col) const {
    const uint32_t signs = dropout_.kept_signs(Dropout::word(random, row, col));
    return col % 2 ? signs : signs << 16;
  }
  // Bits 0 and 1: whether columns col and col + 1 are kept, col even.
  __device__ __forceinline__ uint32_t kept_pair(const Philox& random, int row, int col) const {
    const uint32_t signs = dropout_.kept_signs(Dropout::word(random, row, col));
    return (signs >> 15 & 1) | (signs >> 30 & 2);
  }

  __device__ __forceinline__ bool has_bias() const { return bias_.ptr != nullptr; }
  // 0 outside the sequence.
  __device__ __forceinline__ float bias(int row, int col) const {
    if (row >= band_.seqlen_q || col >= band_.seqlen_k) return 0.f;
    const int64_t i = bias_offset_ + row * bias_.row + col * bias_.col;
    return bias_.is_f32 ? static_cast<const float*>(bias_.ptr)[i] : to_float(static_cast<const T*>(bias_.ptr)[i]);
  }

 private:
  ScoreMod mod_;
  Band band_;
  Bias bias_;
  int64_t bias_offset_;
  Dropout dropout_;
  uint32_t head_index_;
  bool drops_;
};

}  // namespace flash::sm80
