"""flash_ext as an attention function of Hugging Face transformers (4.48 or later).

from flash_ext.integrations.transformers import register
register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_ext", dtype="bfloat16")
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import forward


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
    **_ignored: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: tensors (batch, heads, seqlen, head_dim) in, (batch, seqlen, heads, head_dim) out.

    ``attention_mask``: None, or (batch, 1 | heads, seqlen_q, seqlen_k), boolean (True: visible) or additive; it then holds
    causality and window too. ``sliding_window``: keys that a query sees, itself among them. ``s_aux``: attention sinks.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window, bias = (-1, -1), None
    if attention_mask is not None:
        bias = attention_mask[..., : key.shape[2]]
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, float("-inf"))
        causal = False
    elif sliding_window is not None and causal:
        window = (sliding_window - 1, 0)
    out = forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal,
        softmax_scale=scaling,
        window_size=window,
        softcap=softcap or 0.0,
        attn_bias=bias,
        sinks=s_aux,
        dropout_p=dropout if module.training else 0.0,
    )
    return out, None


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
