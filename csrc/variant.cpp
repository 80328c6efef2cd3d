// Linked into a kernel variant that bench.tune builds as a library of its own; api.cpp's override_row reads it.
#include "registry.h"

extern "C" flash::Launchers* flash_variant_launchers(int row) { return &flash::launchers(row); }
