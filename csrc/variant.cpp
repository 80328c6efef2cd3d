// Linked into a kernel variant that bench.tune or the JIT builds as a library of its own; api.cpp's override_row reads
// it.
#include "registry.h"

extern "C" __attribute__((visibility("default"))) flash::Launchers* flash_variant_launchers(int row) {
  return &flash::launchers(row);
}
