"""The names and arguments of the flash_attn package, where they differ from ``interface``."""

from __future__ import annotations

from torch import Tensor

from .call import check_kind
from .interface import attend, flash_attn_varlen_func


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """``forward`` under the name, positions and keywords of the flash_attn package.

    With ``return_attn_probs`` the result is (out, lse, None): the probabilities themselves are never formed.
    """
    call = (
        q, k, v, None, None, None, alibi_slopes, attn_bias, sinks,
        causal, softmax_scale, window_size, softcap, dropout_p, deterministic, 0, 0,
    )  # fmt: skip
    result = attend(call, return_attn_probs)
    return (*result, None) if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """``flash_attn_func`` of qkv (batch, seqlen, 3, num_heads, head_dim); the three are read in place."""
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(*_unbind(qkv, "qkv", 3, 5), dropout_p, *options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """``flash_attn_func`` of q and kv (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, *_unbind(kv, "kv", 2, 5), dropout_p, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """``flash_attn_varlen_func`` of qkv (total, 3, num_heads, head_dim)."""
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(*_unbind(qkv, "qkv", 3, 4), *lengths, dropout_p, *options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """``flash_attn_varlen_func`` of q and kv (total_k, 2, num_heads_kv, head_dim)."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, *_unbind(kv, "kv", 2, 4), *lengths, dropout_p, *options)


def _unbind(packed: Tensor, name: str, parts: int, dims: int) -> tuple[Tensor, ...]:
    """The parts of (..., parts, num_heads, head_dim), as views."""
    check_kind(name, packed)
    if packed.dim() != dims or packed.shape[-3] != parts:
        rows = "batch, seqlen" if dims == 5 else "total"
        raise ValueError(f"{name} must have shape ({rows}, {parts}, num_heads, head_dim), got {tuple(packed.shape)}")
    return packed.unbind(-3)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a key-value cache that it may also extend. Not supported yet: raises ``NotImplementedError``."""
    raise NotImplementedError(
        "flash_attn_with_kvcache is not supported yet; forward and flash_attn_varlen_func (with seqused_k) read caches "
        "that are already filled"
    )
