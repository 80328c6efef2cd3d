"""What csrc/binding.cpp exports. Python has checked every argument before it comes here."""

from collections.abc import Sequence

from torch import Tensor, dtype

class Scalars:
    """The numbers of a call."""

    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float
    deterministic: int

class Options(Scalars):
    """Everything of a call but q, k, v and its results."""

    def __init__(self, scalars: Scalars = ...) -> None: ...
    cu_seqlens_q: Tensor | None  # (batch + 1) int32
    cu_seqlens_k: Tensor | None  # (batch + 1) int32
    seqused_k: Tensor | None  # (batch) int32
    alibi_slopes: Tensor | None  # (num_heads) or (batch, num_heads) fp32
    attn_bias: Tensor | None  # (batch | 1, num_heads | 1, seqlen_q | 1, seqlen_k | 1) fp32 or q's dtype
    sinks: Tensor | None  # (num_heads) fp32
    rng_state: Tensor | None  # (2) int64
    q_descale: Tensor | None  # (batch, num_heads_kv) fp32, as are the next two
    k_descale: Tensor | None
    v_descale: Tensor | None
    workspace: Tensor | None  # of a forward, as many bytes as fwd_workspace says

# The kernel table (csrc/instances.h), row by row: the eight numbers of dispatch.Key.
def instances() -> list[tuple[int, int, int, int, int, int, int, int]]: ...
def row_name(row: int) -> str: ...
def is_built(row: int) -> bool: ...
def override_row(row: int, path: str) -> None: ...

# Key of checked calls, without their numbers; its last byte tells whether a gradient is wanted. b"": the dispatcher has to
# see the call.
def signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    attn_bias: Tensor | None,
    sinks: Tensor | None,
) -> bytes: ...

# call.Extras
_Extras = Sequence[Tensor | None]

class Kernels:
    """What serves a call: rows of the table, -1 for tensors in host memory, and the call's numbers. Allocates results and
    workspace."""

    fwd_row: int
    bwd_row: int
    dbias_row: int
    scalars: Scalars
    # out, lse
    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: _Extras) -> tuple[Tensor, Tensor]: ...
    # The same of float8 inputs, with the factors of q, k and v
    def forward8(
        self, q: Tensor, k: Tensor, v: Tensor, extras: _Extras, descales: _Extras, out_dtype: dtype
    ) -> tuple[Tensor, Tensor]: ...
    # out, lse, with gradients of q, k and v recorded
    def attend(self, q: Tensor, k: Tensor, v: Tensor, extras: _Extras) -> tuple[Tensor, Tensor]: ...
    # dq, dk, dv, delta; adds to dbias (fp32) if it is given
    def backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        extras: _Extras,
        dbias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

# A call (call.Arguments) that was remembered: out, or (out, lse). Another: its key, which like a signature's may be b"".
def eager(call: tuple, return_lse: bool, path: str, /) -> Tensor | tuple[Tensor, Tensor] | bytes: ...

# Have `eager` serve the calls of this key from now on: by these kernels, with their extras as they are.
def remember(key: bytes, kernels: Kernels) -> None: ...

# How many calls were remembered.
def forget() -> int: ...

# out in `out_dtype`, and lse; not initialised.
def empty_results(q: Tensor, head_dim_v: int, out_dtype: dtype) -> tuple[Tensor, Tensor]: ...

# What the error says where a gradient is differentiated.
TWICE: str

# Fills what C++ allocates from now on with a number (bytes with 255); None: nothing.
def poison(value: float | None) -> None: ...

# Whether the last dimension is contiguous.
def has_rows(t: Tensor) -> bool: ...

# Whether the Hopper copy engine takes it: base and strides in multiples of 16 bytes, no row expanded.
def is_aligned(t: Tensor) -> bool: ...

# One row of the table on a CUDA stream; asynchronous.
def fwd(row: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, stream: int) -> None: ...
def bwd(
    row: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None,
    workspace: Tensor | None,
    options: Options,
    stream: int,
) -> None: ...
def fwd_workspace(row: int, q: Tensor, k: Tensor, v: Tensor, options: Options) -> int: ...
def bwd_workspace(row: int, q: Tensor, k: Tensor, v: Tensor, options: Options) -> int: ...
