// What the general variants add: softcap, ALiBi, bias and dropout, switched at run time, for one tile of scores.
#pragma once

#include "../attn/dropout.h"
#include "../attn/mask.h"
#include "../attn/numeric.cuh"
#include "../attn/score.h"

namespace flash::sm80 {

template <class T>
class General {
 public:
  __device__ General(const AttnParams& p, const Band& band, int batch_index, int head)
      : mod_(ScoreMod::of(p, batch_index, head)), band_(band), bias_(p.bias), dropout_{}, drops_(p.dropout_p != 0.f) {
    bias_offset_ = batch_index * p.bias.batch + head * p.bias.head;
    head_index_ = uint32_t(batch_index) * p.num_heads + head;
    if (drops_) dropout_ = Dropout::of(p.dropout_p, p.rng_state);
  }

  // The score, in natural units, that enters the softmax; (row, col) must lie inside the sequence if there is a bias.
  __device__ __forceinline__ float score(float qk, int row, int col) const {
    return mod_(qk, abs(band_.diagonal(row) - col), bias(row, col));
  }
  __device__ __forceinline__ float derivative(float qk) const { return mod_.derivative(qk); }

  __device__ __forceinline__ bool drops() const { return drops_; }
  __device__ __forceinline__ float keep_scale() const { return drops_ ? dropout_.scale : 1.f; }
  // The random bits of the lane's columns of `row` in the 64 that hold `col`; they serve both halves.
  __device__ __forceinline__ Philox draw(int row, int col) const { return dropout_.draw(head_index_, row, col); }
  __device__ __forceinline__ bool keep(const Philox& random, int col) const { return dropout_.keep(random, col); }

 private:
  __device__ __forceinline__ float bias(int row, int col) const {
    if (bias_.ptr == nullptr || row >= band_.seqlen_q || col >= band_.seqlen_k) return 0.f;
    const int64_t i = bias_offset_ + row * bias_.row + col * bias_.col;
    return bias_.is_f32 ? static_cast<const float*>(bias_.ptr)[i] : to_float(static_cast<const T*>(bias_.ptr)[i]);
  }

  ScoreMod mod_;
  Band band_;
  Bias bias_;
  int64_t bias_offset_;
  Dropout dropout_;
  uint32_t head_index_;
  bool drops_;
};

}  // namespace flash::sm80
