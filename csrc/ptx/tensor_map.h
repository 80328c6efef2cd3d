// cuTensorMapEncodeTiled for the tensors of attention. The entry point comes from the runtime: nothing links to
// libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "../check.h"
#include "../params.h"

namespace flash::ptx {

// A map of (batch, seqlen, heads, dim) elements of 16 or 8 bits for copies of `box_rows` x 128 bytes, written to shared
// memory in the 128-byte swizzle. `columns` is the tensor's true last dimension: a copy reads zeros beyond it and
// beyond `rows`. Packed tensors have batch 1 and rows = total. A dimension of stride 0 (expanded, or of size 1) has
// size 1 in the map: pass coordinate 0 for it (see coordinate_step).
struct TensorShape {
  int64_t rows, heads, batch;
  int columns;
};

// What an index of a dimension is multiplied with to give its coordinate: 0 where the dimension is expanded.
inline int coordinate_step(int64_t stride) { return stride == 0 ? 0 : 1; }

struct CoordinateSteps {
  int batch, head;
};
inline CoordinateSteps coordinate_steps(const Strided& t) {
  return {coordinate_step(t.batch), coordinate_step(t.head)};
}

// Whether the copy engine can read (and write) the tensor: base and strides in multiples of 16 bytes.
inline bool tma_can_read(const Strided& t, int element_bytes) {
  const int64_t bytes = int64_t(element_bytes);
  return reinterpret_cast<uintptr_t>(t.ptr) % 16 == 0 && t.row * bytes % 16 == 0 && t.head * bytes % 16 == 0 &&
         t.batch * bytes % 16 == 0 && t.row >= 0 && t.head >= 0 && t.batch >= 0;
}

// Ordinary 16-byte loads and stores need the same.
inline void check_aligned(const Strided& t, int element_bytes, const char* name) {
  FLASH_CHECK_ARG(tma_can_read(t, element_bytes), name, " needs a 16-byte aligned address and strides in multiples of ",
                  16 / element_bytes, " elements, got an address of 16n + ", reinterpret_cast<uintptr_t>(t.ptr) % 16,
                  " and strides (", t.batch, ", ", t.row, ", ", t.head, ")");
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
  static const EncodeTiled entry = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    FLASH_CHECK_CUDA(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
        "cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess || found == nullptr)
      throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return entry;
}

inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::kE4M3  ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

inline CUtensorMap tensor_map(const Strided& t, const TensorShape& shape, DType dtype, int box_rows, const char* name) {
  const int element_bytes = dtype == DType::kE4M3 ? 1 : 2;
  check_aligned(t, element_bytes, name);
  FLASH_CHECK_ARG(t.row != 0 || shape.rows <= 1, name,
                  " must not be expanded along its rows: the copy engine needs a row stride other than 0");
  const int64_t strides[3] = {t.row, t.head, t.batch};
  const int64_t sizes[3] = {shape.rows, shape.heads, shape.batch};
  cuuint64_t dims[4] = {cuuint64_t(shape.columns), 1, 1, 1};
  cuuint64_t bytes[3];
  for (int i = 0; i < 3; i++) {
    if (strides[i] != 0) dims[i + 1] = cuuint64_t(sizes[i] > 0 ? sizes[i] : 1);
    bytes[i] = cuuint64_t(strides[i] != 0 ? strides[i] * element_bytes : 16);
  }
  const cuuint32_t box[4] = {cuuint32_t(128 / element_bytes), cuuint32_t(box_rows), 1, 1}, ones[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode_tiled()(&map, map_type(dtype), 4, t.ptr, dims, bytes, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw std::runtime_error(message("cuTensorMapEncodeTiled failed for ", name, " with CUresult ", int(status)));
  return map;
}

}  // namespace flash::ptx
