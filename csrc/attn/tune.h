// Where bench.tune puts other tile numbers into the kernel that it builds, without editing files: assignments to the
// fields of `t`, as in -DFLASH_TUNE_FWD="t.block_n=96;t.kv_stages=3". Every other build leaves the numbers alone.
#pragma once

#ifndef FLASH_TUNE_FWD
#define FLASH_TUNE_FWD
#endif
#ifndef FLASH_TUNE_BWD
#define FLASH_TUNE_BWD
#endif
#ifndef FLASH_TUNE_FP8
#define FLASH_TUNE_FP8
#endif
