// The shared memory of a device: what decides between the tiles of a row.
#pragma once

namespace flash {

// In bytes; each block also costs kReserved.
struct SharedMemory {
  int per_block, per_sm;
  static constexpr int kReserved = 1024;
};
inline constexpr SharedMemory kSharedMemorySm80{163 * 1024, 164 * 1024}, kSharedMemorySm86{99 * 1024, 100 * 1024},
    kSharedMemorySm90{227 * 1024, 228 * 1024};  // sm_89 and sm_120 are like sm_86, sm_100 like sm_90

constexpr bool fits(const SharedMemory& memory, int blocks, int bytes) {
  return bytes <= memory.per_block && blocks * (bytes + SharedMemory::kReserved) <= memory.per_sm;
}

// `memory`, but a block has no more than `per_block`.
constexpr SharedMemory with_smaller_blocks(const SharedMemory& memory, int per_block) {
  if (per_block >= memory.per_block) return memory;
  return {per_block, per_block + SharedMemory::kReserved};
}

// FLASH_EXT_SHARED_MEMORY=99 in the environment: as if a block could have 99 KiB at most, so that a large GPU runs the
// tiles of smaller ones.
SharedMemory shared_memory_of(int device);

}  // namespace flash
