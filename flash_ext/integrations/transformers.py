"""flash_ext as an attention function of Hugging Face transformers (4.48 or later).

from flash_ext.integrations.transformers import register
register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_ext", dtype="bfloat16")
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import flash_attn_varlen_func, forward


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    head_mask: None = None,
    position_bias: None = None,
    **_ignored: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: tensors (batch, heads, seqlen, head_dim) in, (batch, seqlen, heads, head_dim) out.

    ``attention_mask``: None, or (batch, 1 | heads, seqlen_q, seqlen_k), boolean (True: visible) or additive; it then holds
    causality and window too. ``sliding_window``: keys that a query sees, itself among them. ``s_aux``: attention sinks.
    ``cu_seq_lens_q``, ``cu_seq_lens_k``: of sequences that lie packed in the batch's rows; with ``attention_mask`` as well,
    both hold.
    """
    for name, given in (("head_mask", head_mask), ("position_bias", position_bias)):
        if given is not None:
            raise NotImplementedError(
                f"{name} is not supported; add it to attention_mask, or choose attn_implementation='sdpa'"
            )
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given together")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options = {
        "causal": causal and attention_mask is None,
        "softmax_scale": scaling,
        "window_size": (-1, -1),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "dropout_p": dropout if module.training else 0.0,
    }
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 (a query sees itself), or None; got {sliding_window}")
    if options["causal"] and sliding_window is not None:
        options["window_size"] = (sliding_window - 1, 0)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if cu_seq_lens_q is not None and attention_mask is None:
        rows = [t.flatten(0, 1) for t in (q, k, v)]
        longest = (rows[i].shape[0] if n is None else n for i, n in enumerate((max_length_q, max_length_k)))
        out = flash_attn_varlen_func(*rows, cu_seq_lens_q, cu_seq_lens_k, *longest, **options)
        return out.unflatten(0, q.shape[:2]), None
    if attention_mask is not None:
        options["attn_bias"] = _bias(attention_mask[..., : k.shape[1]], q.dtype, cu_seq_lens_q, cu_seq_lens_k)
    return forward(q, k, v, **options), None


def _bias(mask: Tensor, dtype: torch.dtype, cu_q: Tensor | None, cu_k: Tensor | None) -> Tensor:
    """The mask as what is added to the scores, with -inf between packed sequences and for the lowest number, which masks
    in transformers: rows of padding then see nothing instead of an average."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
    else:
        mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf"))
    if cu_q is None:
        return mask
    if mask.shape[0] != 1:
        raise NotImplementedError(f"packed sequences with attention_mask must lie in a batch of 1, got {mask.shape[0]}")
    rows = (torch.arange(n, device=mask.device, dtype=torch.int32) for n in mask.shape[-2:])
    of_q, of_k = (torch.bucketize(row, cu[1:], right=True) for row, cu in zip(rows, (cu_q, cu_k), strict=True))
    return mask.masked_fill(of_q[:, None] != of_k, float("-inf"))


def register(name: str = "flash_ext") -> None:
    """Make ``attn_implementation=name`` known to transformers, with the masks that ``attention_forward`` reads."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention_forward)
    try:
        from transformers import AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError:  # before 4.53 models make their masks themselves
        return
    AttentionMaskInterface.register(name, sdpa_mask)
