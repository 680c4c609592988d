"""Write NaN and Inf into an operand, and verify that they stay out of independent results."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.call.call import Call
from fa_ops.testing.inputs import Case, PackedCase

NUMBERS = ("nan", "inf", "-inf")
OPERANDS = ("query", "key", "value", "grad_out", "attn_mask", "sinks", "alibi_slopes")
MIN_VISIBLE_WEIGHT = 0.01  # a NaN in a key or value with a larger weight must be in the output
LARGE_SCORE = 2.0**16  # beyond it a float32 lse cannot represent the logarithm of a few keys


def scores_of(call: Call) -> Tensor:
    """Scores in fp64, (B, Hq, Sq, Sk), -inf where masked; a packed batch is one sequence."""
    if not call.is_packed:
        return _dense_scores(call)
    q, k, v = call[:3]
    scores = q.new_full((1, q.shape[1], len(q), len(k)), float("-inf"), dtype=torch.float64)
    ends_q, ends_k = call.operands.cu_seqlens_q.tolist(), call.operands.cu_seqlens_k.tolist()
    for b in range(len(ends_q) - 1):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        scores[:, :, rows, keys] = _dense_scores(call.rows(slice(b, b + 1), *one))
    return scores


def _meaning(case: Case | PackedCase, call: Call) -> Call:
    """The call with valid borders of sequences."""
    if not isinstance(case, PackedCase):
        return call
    ends_q, ends_k = case.meaning()
    return call.changed(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)


def _dense_scores(call: Call) -> Tensor:
    q, k = call.query.double(), call.key.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return reference.modify_scores(q @ k.transpose(-1, -2), call)


class Poison:
    """The `poison` of a case, such as "nan key" or "-inf grad_out", and the results it may change.

    A row of scores is touched by a NaN or Inf in its query, in a key that it attends or that key's
    value, in its row of a mask, or in its head's sink or slope; its gradients also by one in its
    row of grad_out. Results of touched rows, and gradients that are sums over touched rows, are
    unconstrained. All others must be equal to those of the clean inputs.
    """

    def __init__(self, case: Case | PackedCase, call: Call) -> None:
        """Read the clean inputs, then poison one of them in place."""
        self.case, features = case, getattr(case, "features", case)
        number, self.operand = features.poison.split()
        self.number = float(number)
        self.random = torch.Generator().manual_seed(features.seed + 3)
        self.call = call = _meaning(case, call)
        with torch.no_grad():
            scores = scores_of(call)
            self.attends = scores > float("-inf")
            self.unmasked = self.attends  # what the rows would attend without attn_mask
            if self.operand == "attn_mask":
                self.unmasked = scores_of(call.changed(attn_mask=None)) > float("-inf")
            self.probability = reference.weights(scores, call.operands.sinks)[0]
            if features.dropout_p > 0:  # the weight of the poisoned key may have been dropped
                self.probability = torch.zeros_like(self.probability)
            tensors = call._asdict() | call.operands._asdict()
            if self.operand == "grad_out":
                self._find_touched(None)
            else:
                x = tensors[self.operand]
                before = x.clone()
                self._write(x)
                self._find_touched(x != before)

    def _write(self, x: Tensor) -> None:
        """Poison one to three elements or rows of x."""
        rows = x.view(-1, 1) if x.dim() == 1 else x
        for _ in range(self._draw(3) + 1):
            row = rows[tuple(self._draw(n) for n in rows.shape[:-1])]
            if self._draw(2):
                row[:] = self.number
            else:
                row[self._draw(len(row))] = self.number

    def _draw(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.random))

    def _find_touched(self, changed: Tensor | None) -> None:
        """Find the rows that the operand's changed elements touch, and those that must be NaN."""
        self.rows = self.must_show = torch.zeros_like(self.attends[..., 0])
        if self.operand == "query":
            self.rows = self._rows(changed.any(-1))
            self.must_show = self.rows & self.attends.any(-1)
        elif self.operand in ("key", "value"):
            keys = self._rows(changed.any(-1))
            keys = keys.repeat_interleave(self.rows.shape[1] // keys.shape[1], 1).unsqueeze(2)
            self.rows = (keys & self.attends).any(-1)
            self.must_show = (keys & (self.probability > MIN_VISIBLE_WEIGHT)).any(-1)
        elif self.operand == "attn_mask":
            self.rows = (changed & self.unmasked).any(-1)
            self.attends = self.attends | (changed & self.unmasked)
        elif changed is not None and changed.dim() == 2 and self.call.is_packed:
            # slopes of sequences, rows of their tokens
            ends = self.call.operands.cu_seqlens_q.long()
            self.rows = self.rows.clone()
            self.rows[0, :, ends[0] : ends[-1]] = changed.T.repeat_interleave(ends.diff(), 1)
        elif changed is not None:
            self.rows = self.rows | changed.view(-1, changed.shape[-1], 1)
        self.rows_backward = self.rows

    def _rows(self, x: Tensor) -> Tensor:
        """x with shape (B, H, S), which a packed (T, H) tensor does not have."""
        return x if x.dim() == 3 else x.transpose(0, 1)[None]

    def cotangents(self, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of out and lse, the first of them poisoned if it is the operand."""
        if self.operand == "grad_out":
            grad_out = grad_out.clone() if 0 in grad_out.stride() else grad_out
            self._write(grad_out)
            self.rows_backward = self.rows | self._rows(~torch.isfinite(grad_out).all(-1))
        return grad_out, grad_lse

    def replaced(self, name: str, actual: Tensor, expected: Tensor) -> Tensor:
        """`actual` with its unconstrained elements replaced by those of `expected`."""
        self._assert_nan_shows(name, actual)
        unconstrained = self._unconstrained(name, actual)
        return torch.where(unconstrained, expected.to(actual.dtype), actual)

    def _assert_nan_shows(self, name: str, actual: Tensor) -> None:
        if name != "out" or self.number == self.number:
            return
        hidden = self.must_show & ~self._rows(actual.isnan().any(-1))
        where = hidden.nonzero()[:1].tolist()
        assert not where, f"{self.case}: out: the row at {where[0]} attends a NaN, but has none"

    def _unconstrained(self, name: str, actual: Tensor) -> Tensor:
        packed = self.call.is_packed
        if name in ("out", "grad_q"):
            rows = self.rows if name == "out" else self.rows_backward
            return (rows[0].transpose(0, 1) if packed else rows).unsqueeze(-1)
        if name == "lse":
            return self.rows[0] if packed else self.rows
        if name == "grad_sinks":
            return self.rows_backward.any(2).any(0)
        if name == "grad_attn_mask":
            touched = self.rows_backward.unsqueeze(-1).expand(self.attends.shape)
            return touched.float().sum_to_size(actual.shape) > 0
        touched = (self.attends & self.rows_backward.unsqueeze(-1)).any(2)
        heads = actual.shape[1]
        touched = touched.view(touched.shape[0], heads, -1, touched.shape[2]).any(2)
        return (touched[0].transpose(0, 1) if packed else touched).unsqueeze(-1)


class Ties:
    """Rows with several largest scores that are too large for a float32 lse to count them.

    Their results must be finite, and may be the value of any of those keys or a mean of them.
    """

    def __init__(self, case: Case | PackedCase, call: Call) -> None:
        self.case, self.is_packed = case, call.is_packed
        with torch.no_grad():
            scores = scores_of(_meaning(case, call))
            top = scores.amax(-1, keepdim=True)
            near = scores >= top - top.abs() * torch.finfo(torch.float32).eps * 4
            self.rows = (near.sum(-1) > 1) & (top.squeeze(-1).abs() > LARGE_SCORE)

    def replaced(self, name: str, actual: Tensor, expected: Tensor) -> Tensor:
        """`actual`, which must be finite, with the rows of ties replaced by `expected`."""
        finite = torch.isfinite(actual) | ~torch.isfinite(expected)
        assert bool(finite.all()), f"{self.case}: {name} is not finite"
        if name != "out":
            return actual
        rows = self.rows[0].transpose(0, 1) if self.is_packed else self.rows
        return torch.where(rows.unsqueeze(-1), expected.to(actual.dtype), actual)


class CachePoison(Poison):
    """`Poison` for a call over a cache: a NaN or Inf in a query, or in a key or value in use."""

    def __init__(self, case, call: Call) -> None:
        """Read a clean call whose new keys have been written."""
        self.case, (number, self.operand) = case, case.poison.split()
        self.number, self.random = float(number), torch.Generator().manual_seed(case.seed + 3)
        self.attends, self.visible = [], []

        def attend(call):
            scores, sinks = _dense_scores(call), call.operands.sinks
            self.attends.append(scores[0] > float("-inf"))
            self.visible.append(reference.weights(scores, sinks)[0][0] > MIN_VISIBLE_WEIGHT)
            return call.query, call.query[..., 0]

        q, t = call.query, call.operands
        appended = call.without_new().changed(rotary_cos=t.rotary_cos, rotary_sin=t.rotary_sin)
        reference.cached(appended, attend)
        self.rows = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
        self.must_show = torch.zeros_like(self.rows)

    def write(self, call: Call) -> None:
        """Poison one row of the operand."""
        (q, k, v), new = call[:3], call.operands.new_key
        b = self._draw(len(q))
        if self.operand == "query":
            h, i = self._draw(q.shape[1]), self._draw(q.shape[2])
            q[b, h, i, self._draw(q.shape[3])] = self.number
            self.rows[b, h, i] = True
            self.must_show[b, h, i] = self.attends[b][h, i].any()
            return
        keys = self.attends[b].shape[2] - (0 if new is None else new.shape[2])
        if keys <= 0:
            return
        j, h = self._draw(keys), self._draw(k.shape[2 if call.is_paged else 1])
        memory = k if self.operand == "key" else v
        number = torch.tensor(self.number, device=k.device).to(memory.dtype)
        view, index = reference.slots(memory, call.operands.page_table, b, j, j + 1)
        row = view[index]
        row[:, h, self._draw(min(k.shape[3], v.shape[3]))] = number.view(view.dtype)
        view[index] = row
        heads = slice(h * q.shape[1] // row.shape[1], (h + 1) * q.shape[1] // row.shape[1])
        self.rows[b, heads] = self.attends[b][heads, :, j]
        if not (self.case.fp8 and q.device.type == "cpu"):  # Triton's interpreter has no fp8 NaN
            self.must_show[b, heads] = self.visible[b][heads, :, j]

    def _unconstrained(self, name: str, actual: Tensor) -> Tensor:
        return self.rows.unsqueeze(-1) if name == "out" else self.rows
