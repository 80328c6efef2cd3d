"""flash_ext: exact attention for PyTorch as hand-written CUDA C++ kernels.

``forward`` is the main call; ``flash_attn_func`` and its relatives take the flash_attn package's arguments.
"""

from .explain import Explanation, explain
from .extension import use_path
from .flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .float8 import quantize_fp8
from .interface import flash_attn_varlen_func, forward, merge_states

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "forward",
    "merge_states",
    "quantize_fp8",
    "use_path",
]
