// Attention from C++ without torch: forward and backward on the CPU and, where kernels are built and a GPU is present,
// the same two calls on the GPU, compared.
//
//   cmake -S . -B build/cmake && cmake --build build/cmake --target attention && build/cmake/attention
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "api.h"

#ifdef FLASH_EXT_CUDA
#include <cuda_runtime.h>

#include "check.h"
#endif

namespace {

constexpr int kBatch = 2, kSeqlen = 1024, kHeads = 4, kHeadsKV = 2, kHeadDim = 64;

std::vector<float> random_normal(size_t size, int seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(size);
  for (float& value : x) value = normal(bits);
  return x;
}

// Where the tensors of a problem are: in host memory here, in the GPU's below.
struct Memory {
  float *q, *k, *v, *out, *dout;  // (batch, seqlen, heads, head_dim); k and v have kHeadsKV heads
  float *dq, *dk, *dv;
  float *lse, *delta;  // (batch, heads, seqlen)
};

// A contiguous tensor of (batch, seqlen, heads, head_dim); strides count elements.
flash::Strided strided(float* data, int heads) {
  return {data, int64_t(kSeqlen) * heads * kHeadDim, int64_t(heads) * kHeadDim, kHeadDim};
}

template <class Params>
Params params(const Memory& m) {
  Params p;
  p.q = strided(m.q, kHeads);
  p.k = strided(m.k, kHeadsKV);
  p.v = strided(m.v, kHeadsKV);
  p.out = strided(m.out, kHeads);
  p.lse = {m.lse, kHeads * kSeqlen, kSeqlen};
  p.dtype = flash::DType::kF32;
  p.batch = kBatch;
  p.seqlen_q = p.seqlen_k = kSeqlen;
  p.total_q = p.total_k = kBatch * kSeqlen;
  p.num_heads = kHeads;
  p.num_heads_kv = kHeadsKV;
  p.head_dim = p.head_dim_v = kHeadDim;
  p.softmax_scale = 1.f / std::sqrt(float(kHeadDim));
  p.window_right = 0;  // causal
  return p;
}

flash::BwdParams bwd_params(const Memory& m) {
  auto p = params<flash::BwdParams>(m);
  p.dout = strided(m.dout, kHeads);
  p.delta = {m.delta, kHeads * kSeqlen, kSeqlen};
  p.dq = strided(m.dq, kHeads);
  p.dk = strided(m.dk, kHeadsKV);
  p.dv = strided(m.dv, kHeadsKV);
  return p;
}

double milliseconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since).count();
}

// ||a - b|| / ||b||
double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double distance = 0, norm = 0;
  for (size_t i = 0; i < a.size(); i++) distance += (a[i] - b[i]) * (a[i] - b[i]), norm += b[i] * b[i];
  return std::sqrt(distance / norm);
}

// The last query of the first head, by the formula: softmax(scale * q k^T) v over all keys.
std::vector<float> last_row(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v) {
  const float* const query = &q[size_t(kSeqlen - 1) * kHeads * kHeadDim];
  std::vector<double> out(kHeadDim, 0.);
  double sum = 0;
  for (int j = 0; j < kSeqlen; j++) {
    const size_t row = size_t(j) * kHeadsKV * kHeadDim;
    double score = 0;
    for (int d = 0; d < kHeadDim; d++) score += query[d] * k[row + d];
    const double weight = std::exp(score / std::sqrt(double(kHeadDim)));
    sum += weight;
    for (int d = 0; d < kHeadDim; d++) out[d] += weight * v[row + d];
  }
  std::vector<float> result(kHeadDim);
  for (int d = 0; d < kHeadDim; d++) result[d] = float(out[d] / sum);
  return result;
}

#ifdef FLASH_EXT_CUDA
// Host tensors, in the order of Memory's members, to the GPU; forward, backward; and back. False if no kernel serves
// it.
bool run_on_gpu(const std::vector<std::vector<float>*>& tensors) {
  cudaDeviceProp device;
  FLASH_CHECK_CUDA(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  const flash::Arch arch = device.major >= 8 ? flash::Arch::kSm80 : flash::Arch::kSimt;

  std::vector<float*> on_gpu;
  for (const std::vector<float>* tensor : tensors) {
    on_gpu.push_back(nullptr);
    FLASH_CHECK_CUDA(cudaMalloc(&on_gpu.back(), tensor->size() * sizeof(float)), "cudaMalloc");
    FLASH_CHECK_CUDA(cudaMemcpy(on_gpu.back(), tensor->data(), tensor->size() * sizeof(float), cudaMemcpyHostToDevice),
                     "cudaMemcpy");
  }
  const Memory m{on_gpu[0], on_gpu[1], on_gpu[2], on_gpu[3], on_gpu[4],
                 on_gpu[5], on_gpu[6], on_gpu[7], on_gpu[8], on_gpu[9]};
  const auto fwd = params<flash::FwdParams>(m);
  auto bwd = bwd_params(m);

  // The table names every kernel; the first row that serves the call and is in this build runs it.
  const int fwd_row = flash::find_row(flash::key_of(flash::Pass::kFwd, arch, fwd));
  const int bwd_row = flash::find_row(flash::key_of(flash::Pass::kBwd, arch, bwd));
  if (fwd_row < 0 || bwd_row < 0) return false;
  std::printf("GPU: %s, '%s' and '%s'\n", device.name, flash::to_string(flash::kInstances[fwd_row]).c_str(),
              flash::to_string(flash::kInstances[bwd_row]).c_str());

  FLASH_CHECK_CUDA(cudaMalloc(&bwd.workspace, std::max<int64_t>(flash::bwd_workspace(bwd_row, bwd), 1)), "cudaMalloc");
  const cudaStream_t stream = nullptr;
  flash::fwd(fwd_row, fwd, stream);
  flash::bwd(bwd_row, bwd, stream);
  FLASH_CHECK_CUDA(cudaStreamSynchronize(stream), "forward and backward");

  for (size_t i = 0; i < tensors.size(); i++) {
    FLASH_CHECK_CUDA(
        cudaMemcpy(tensors[i]->data(), on_gpu[i], tensors[i]->size() * sizeof(float), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
    cudaFree(on_gpu[i]);
  }
  cudaFree(bwd.workspace);
  return true;
}
#endif

}  // namespace

int main() {
  const size_t size = size_t(kBatch) * kSeqlen * kHeads * kHeadDim, size_kv = size / kHeads * kHeadsKV;
  std::vector<float> q = random_normal(size, 1), k = random_normal(size_kv, 2), v = random_normal(size_kv, 3);
  std::vector<float> dout = random_normal(size, 4), out(size), dq(size), dk(size_kv), dv(size_kv);
  std::vector<float> lse(size / kHeadDim), delta(size / kHeadDim);
  const Memory m{q.data(),  k.data(),  v.data(),  out.data(), dout.data(),
                 dq.data(), dk.data(), dv.data(), lse.data(), delta.data()};

  const int threads = std::max(1u, std::thread::hardware_concurrency());
  auto start = std::chrono::steady_clock::now();
  flash::fwd_cpu(params<flash::FwdParams>(m), threads);
  const double fwd_ms = milliseconds(start);
  start = std::chrono::steady_clock::now();
  flash::bwd_cpu(bwd_params(m), threads);
  const double bwd_ms = milliseconds(start);
  std::printf("CPU: %d threads, forward %.1f ms, backward %.1f ms\n", threads, fwd_ms, bwd_ms);

  const std::vector<float> expected = last_row(q, k, v);
  const auto last = out.begin() + size_t(kSeqlen - 1) * kHeads * kHeadDim;
  const double cpu_error = difference({last, last + kHeadDim}, expected);
  std::printf("CPU against the formula: %.1e\n", cpu_error);
  bool ok = cpu_error < 1e-5;

#ifdef FLASH_EXT_CUDA
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) {
    std::vector<float> gpu_out(size), gpu_dq(size), gpu_dk(size_kv), gpu_dv(size_kv), gpu_lse(lse.size()),
        gpu_delta(lse.size());
    if (run_on_gpu({&q, &k, &v, &gpu_out, &dout, &gpu_dq, &gpu_dk, &gpu_dv, &gpu_lse, &gpu_delta})) {
      for (const auto& [name, gpu, cpu] : {std::tuple{"out", &gpu_out, &out},
                                           {"lse", &gpu_lse, &lse},
                                           {"dq", &gpu_dq, &dq},
                                           {"dk", &gpu_dk, &dk},
                                           {"dv", &gpu_dv, &dv}}) {
        std::printf("GPU against CPU, %s: %.1e\n", name, difference(*gpu, *cpu));
        ok = ok && difference(*gpu, *cpu) < 2e-5;
      }
    } else {
      std::printf("GPU: no kernel of this build serves the call\n");
    }
  } else {
    std::printf("GPU: none\n");
  }
#endif
  std::printf(ok ? "ok\n" : "WRONG\n");
  return ok ? 0 : 1;
}
