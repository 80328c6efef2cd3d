"""Plain attention and its gradients of one problem, in float64 and in the dtype of its inputs, without autograd.

The operators are those of ``flash_ext.reference`` and, one by one, those that autograd runs through it backward, so that the
rounding in 16 bit is that of plain attention. Packed sequences become one batch padded with zeros. Nothing waits for the
device: lengths come from the config. ``test_closed_form.py`` compares it with autograd.
"""

from __future__ import annotations

import math
from functools import cached_property
from itertools import accumulate

import torch
from cases import Config, on_device
from torch import Tensor
from torch.nn.functional import pad

from flash_ext.reference import dropout_mask
from flash_ext.testing import Problem
from flash_ext.tolerance import Results


class ClosedForm:
    """Of a config's problem. Tensors are (batch, num_heads, seqlen, dim), scores (batch, num_heads, seqlen_q, seqlen_k)."""

    def __init__(self, config: Config, problem: Problem):
        self.problem, self.options = problem, problem.options
        self.lengths = config.lengths or ((config.seqlen_q, config.seqlen_k),) * config.batch
        self.used = config.used or tuple(n for _, n in self.lengths)
        self.packed, self.tail = bool(config.lengths), config.tail
        self.batch, self.num_heads = len(self.lengths), config.num_heads
        self.group = config.num_heads // config.num_heads_kv
        self.seqlen_q, self.seqlen_k = (max(side) for side in zip(*self.lengths, strict=True))
        self.device, self.dtype = problem.q.device, problem.q.dtype
        scale = self.options["softmax_scale"]
        self.softmax_scale = config.head_dim**-0.5 if scale is None else scale
        left, right = self.options["window_size"]
        self.left = left
        self.right = (min(right, 0) if right >= 0 else 0) if self.options["causal"] else right
        self.some_see_nothing = (self.packed and self.left >= 0) or any(
            keys == 0 or (self.right >= 0 and keys - queries + self.right < 0)
            for (queries, _), keys in zip(self.lengths, self.used, strict=True)
        )

    # ---- packed rows <-> padded batch

    @cached_property
    def _indices(self) -> tuple[Tensor, ...]:
        """For q and k: the packed row of every padded one (the row behind the last for padding), sequence and row of every
        packed one."""
        parts: list[list[int]] = []
        for side, longest in ((0, self.seqlen_q), (1, self.seqlen_k)):
            lengths = [n[side] for n in self.lengths]
            starts = [0, *accumulate(lengths)]
            where, sequence, row = [], [], []
            for b, (start, length, kept) in enumerate(zip(starts, lengths, (lengths, self.used)[side], strict=False)):
                where += [*range(start, start + kept), *[starts[-1]] * (longest - kept)]
                sequence += [b] * length
                row += range(length)
            parts += [where, sequence, row]
        flat = on_device([i for part in parts for i in part], torch.int64, self.device)
        return flat.split([len(part) for part in parts])

    def padded(self, x: Tensor, side: int) -> Tensor:
        """(total, heads, ...) -> (batch, heads, longest, ...), zero where no sequence has a row."""
        where = self._indices[3 * side]
        total = sum(n[side] for n in self.lengths)
        rows = pad(x[:total], (0, 0) * (x.dim() - 1) + (0, 1))[where]
        return rows.unflatten(0, (self.batch, -1)).transpose(1, 2)

    def unpadded(self, x: Tensor, side: int, tail: int) -> Tensor:
        """(batch, heads, longest, dim) -> (total + tail, heads, dim) with zeros in the tail."""
        x = x.transpose(1, 2)
        if not self.packed:
            return x
        sequence, row = self._indices[3 * side + 1 : 3 * side + 3]
        x = x[sequence, row]
        return pad(x, (0, 0, 0, 0, 0, tail)) if tail else x

    def _heads_first(self, x: Tensor, side: int, group: int = 1) -> Tensor:
        x = self.padded(x, side) if self.packed else x.transpose(1, 2)
        return x.repeat_interleave(group, dim=1) if group > 1 else x.contiguous()

    @cached_property
    def _inputs(self) -> tuple[Tensor, ...]:
        p = self.problem
        keys_and_values = (self._heads_first(x, 1, self.group) for x in (p.k, p.v))
        return self._heads_first(p.q, 0), *keys_and_values

    @cached_property
    def _incoming(self) -> tuple[Tensor, Tensor | None]:
        """dout; dlse (batch, num_heads, seqlen_q, 1), None for zero."""
        dout, dlse = self.problem.gradients
        if not self.problem.with_lse_gradient:
            dlse = None
        elif self.packed:
            dlse = self.padded(dlse.transpose(0, 1)[..., None], 0)
        else:
            dlse = dlse[..., None]
        return self._heads_first(dout, 0), dlse

    # ---- masks and random numbers, the same in every dtype

    @cached_property
    def _diagonal(self) -> Tensor:
        """(batch | 1, 1, seqlen_q, 1): the key that a query would see last if causal."""
        i = torch.arange(self.seqlen_q, device=self.device)[:, None]
        if not self.packed:
            return (i + (self.seqlen_k - self.seqlen_q))[None, None]
        offsets = [keys - queries for (queries, _), keys in zip(self.lengths, self.used, strict=True)]
        return i + on_device(offsets, torch.int64, self.device)[:, None, None, None]

    @cached_property
    def _keys(self) -> Tensor:
        return torch.arange(self.seqlen_k, device=self.device)

    @cached_property
    def _hidden(self) -> Tensor | None:
        """(batch | 1, 1, seqlen_q | 1, seqlen_k)"""
        parts = []
        if self.packed and any(n != self.seqlen_k for n in self.used):
            parts.append(self._keys >= on_device(self.used, torch.int64, self.device)[:, None, None, None])
        if self.left >= 0:
            parts.append(self._keys < self._diagonal - self.left)
        if self.right >= 0:
            parts.append(self._keys > self._diagonal + self.right)
        hidden = None
        for part in parts:
            hidden = part if hidden is None else hidden | part
        return hidden

    @cached_property
    def _kept(self) -> tuple[Tensor, float]:
        heads = self.batch * self.num_heads
        rng_state = self.problem.rng_state()
        keep, scale = dropout_mask(self.options["dropout_p"], rng_state, heads, self.seqlen_q, self.seqlen_k)
        return keep.view(self.batch, self.num_heads, self.seqlen_q, self.seqlen_k), scale

    # ---- the three passes, and back

    def _scores(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the options make of them, a column more with sinks; and softcap's tanh."""
        o, tanh = self.options, None
        if o["softcap"]:
            tanh = torch.tanh(scores / o["softcap"])
            scores = o["softcap"] * tanh
        if (slopes := o.get("alibi_slopes")) is not None:
            slopes = slopes.to(scores.dtype).reshape(-1, self.num_heads, 1, 1)
            scores = scores - slopes * (self._diagonal - self._keys).abs()
        if (bias := o.get("attn_bias")) is not None:
            scores = scores + bias.to(scores.dtype)
        if self._hidden is not None:
            scores = scores.masked_fill(self._hidden, -math.inf)
        if (sinks := o.get("sinks")) is not None:
            column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(self.batch, -1, self.seqlen_q, 1)
            scores = torch.cat([scores, column], dim=-1)
        return scores, tanh

    def results(self, dtype: torch.dtype, backward: bool) -> Results:
        """out, lse (in float64 only) and, with ``backward``, the gradients, as ``Problem.run`` gives them; a dense out and
        the gradients of q, k and v are views that are not contiguous."""
        o, sinks = self.options, self.options.get("sinks")
        q, k, v = (x.to(dtype) for x in self._inputs)
        qs = q * self.softmax_scale
        scores, tanh = self._scores(qs @ k.transpose(2, 3))
        nothing = None
        if self.some_see_nothing and sinks is None:
            nothing = (scores == -math.inf).all(dim=-1, keepdim=True)
            scores = scores.masked_fill(nothing, 0.0)
        probs = torch.softmax(scores, dim=-1)
        if nothing is not None:
            probs = probs.masked_fill(nothing, 0.0)
        kept = probs[..., : self.seqlen_k]
        if o.get("dropout_p"):
            kept = kept * self._kept[0] * self._kept[1]
        results = {"out": self.unpadded(kept @ v, 0, 0)}
        if dtype == torch.float64:  # that of the rounded scores is nobody's measure
            results["lse"] = self._lse(scores, probs, nothing)
        if not backward:
            return results

        dout, dlse = self._incoming
        dout = dout.to(dtype)
        dv = kept.transpose(2, 3) @ dout
        dprobs = dout @ v.transpose(2, 3)
        if o.get("dropout_p"):
            dprobs = dprobs * self._kept[1] * self._kept[0]
        if sinks is not None:
            dprobs = pad(dprobs, (0, 1))
        dscores = torch.ops.aten._softmax_backward_data(dprobs, probs, -1, dtype)
        if dlse is not None:
            dscores = dscores + self._through_lse(scores, probs, dlse)
        if nothing is not None:
            dscores = dscores.masked_fill(nothing, 0.0)
        if sinks is not None:
            column, dscores = dscores[..., -1], dscores[..., :-1]
            wide = torch.promote_types(dtype, torch.float32)
            results["dsinks"] = column.sum(2).to(wide).sum(0) if self.packed else column.sum((0, 2))
        if (bias := o.get("attn_bias")) is not None:
            results["dattn_bias"] = dscores.sum_to_size(bias.shape).contiguous()
        if tanh is not None:
            dscores = torch.ops.aten.tanh_backward(dscores * o["softcap"], tanh) / o["softcap"]
        dq = (dscores @ k) * self.softmax_scale
        dk = dscores.transpose(2, 3) @ qs
        results["dq"] = self.unpadded(dq, 0, self.tail)
        for name, x in (("dk", dk), ("dv", dv)):
            x = x.unflatten(1, (-1, self.group)).sum(2) if self.group > 1 else x
            results[name] = self.unpadded(x, 1, self.tail)
        return results

    def _lse(self, scores: Tensor, probs: Tensor, nothing: Tensor | None) -> Tensor:
        """(batch, num_heads, seqlen_q), or (num_heads, total_q) if packed."""
        lse = scores.amax(dim=-1, keepdim=True) - probs.amax(dim=-1, keepdim=True).log()
        lse = lse if nothing is None else lse.masked_fill(nothing, -math.inf)
        return self.unpadded(lse, 0, 0)[..., 0].transpose(0, 1) if self.packed else lse[..., 0]

    @staticmethod
    def _through_lse(scores: Tensor, probs: Tensor, dlse: Tensor) -> Tensor:
        """The gradient of the scores that comes through the lse, which 16 bit compute in fp32."""
        if scores.dtype == torch.float64:
            return dlse * probs
        wide = scores.float()
        return (dlse * (wide - torch.logsumexp(wide, dim=-1, keepdim=True)).exp()).to(scores.dtype)
