"""NaN and Inf in a few places of an operand, and which results they may not reach."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.testing.inputs import Case, PackedCase
from fa_ops.types import Cache, Packing, Spec, longer

NUMBERS = ("nan", "inf", "-inf")
OPERANDS = ("query", "key", "value", "grad_out", "attn_mask", "sinks", "alibi_slopes")
WEIGHT = 0.01  # of a key from which on its NaN has to show
LARGE = 2.0**16  # a score from which on lse does not hold the logarithm of a few keys beside it


def scores_of(packing: Packing | None, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
    """fp64 (B, Hq, Sq, Sk), -inf where not attended; all tokens of a packed batch together."""

    def attend(q, k, v, spec):
        k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        return reference.modify_scores(q.double() @ k.transpose(-1, -2), spec, q.shape[-1])

    if packing is None:
        return attend(q, k, v, spec)
    scores = q.new_full((1, q.shape[1], len(q), len(k)), float("-inf"), dtype=torch.float64)
    ends_q, ends_k = (ends.tolist() for ends in packing[:2])
    for b in range(len(ends_q) - 1):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        scores[:, :, rows, keys] = attend(*one, reference.sequence_spec(spec, b))
    return scores


class Poison:
    """What the `poison` of a case means, such as "nan key" or "-inf grad_out".

    A row of scores is touched by a NaN or Inf in its query, in a key that it attends, in that
    key's value, in its part of a mask, or in its head's sink or slope; its gradients also by one
    in its row of grad_out. Results of touched rows, and gradients that are sums over a touched
    row, may be anything. All others must be what they are without the poison.
    """

    def __init__(self, case: Case | PackedCase, q: Tensor, k: Tensor, v: Tensor, spec: Spec):
        """Read the clean inputs, then write into them, in place."""
        self.case, features = case, getattr(case, "features", case)
        number, self.operand = features.poison.split()
        self.number = float(number)
        self.random = torch.Generator().manual_seed(features.seed + 3)
        self.packing = case.meaning() if isinstance(case, PackedCase) else None
        with torch.no_grad():
            scores = scores_of(self.packing, q, k, v, spec)
            self.attends = scores > float("-inf")
            self.visible = self.attends  # but for the mask
            if self.operand == "attn_mask":
                open_to_all = spec._replace(attn_mask=None)
                self.visible = scores_of(self.packing, q, k, v, open_to_all) > float("-inf")
            self.probability = reference.weights(scores, spec.sinks)[0]
            if features.dropout_p > 0:  # of which a dropped weight may hide it
                self.probability = torch.zeros_like(self.probability)
            tensors = {"query": q, "key": k, "value": v, **spec._asdict()}
            if self.operand == "grad_out":
                self._touch(None)
            else:
                x = tensors[self.operand]
                before = x.clone()
                self._write(x)
                self._touch(x != before)

    def _write(self, x: Tensor) -> None:
        """Into one to three elements, or rows of them."""
        rows = x.view(-1, 1) if x.dim() == 1 else x
        for _ in range(self._draw(3) + 1):
            row = rows[tuple(self._draw(n) for n in rows.shape[:-1])]
            if self._draw(2):
                row[:] = self.number
            else:
                row[self._draw(len(row))] = self.number

    def _draw(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.random))

    def _touch(self, changed: Tensor | None) -> None:
        """Find the rows that the operand's changed elements touch, and those that must be NaN."""
        self.rows = self.must_show = torch.zeros_like(self.attends[..., 0])
        if self.operand == "query":
            self.rows = self._rows(changed.any(-1))
            self.must_show = self.rows & self.attends.any(-1)
        elif self.operand in ("key", "value"):
            keys = self._rows(changed.any(-1))
            keys = keys.repeat_interleave(self.rows.shape[1] // keys.shape[1], 1).unsqueeze(2)
            self.rows = (keys & self.attends).any(-1)
            self.must_show = (keys & (self.probability > WEIGHT)).any(-1)
        elif self.operand == "attn_mask":
            self.rows = (changed & self.visible).any(-1)
            self.attends = self.attends | (changed & self.visible)
        elif changed is not None:
            self.rows = self.rows | changed.view(-1, changed.shape[-1], 1)
        self.rows_backward = self.rows

    def _rows(self, x: Tensor) -> Tensor:
        """(B, H, S) as it is, (T, H) as (1, H, T)."""
        return x if x.dim() == 3 else x.transpose(0, 1)[None]

    def seeds(self, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of out and lse, poisoned if they are the operand."""
        if self.operand == "grad_out":
            grad_out = grad_out.clone() if 0 in grad_out.stride() else grad_out
            self._write(grad_out)
            self.rows_backward = self.rows | self._rows(~torch.isfinite(grad_out).all(-1))
        return grad_out, grad_lse

    def judged(self, name: str, actual: Tensor, expected: Tensor) -> Tensor:
        """`actual` with what may be anything replaced by what is expected."""
        self._assert_shows(name, actual)
        free = self._free(name, actual)
        return torch.where(free, expected.to(actual.dtype), actual)

    def _assert_shows(self, name: str, actual: Tensor) -> None:
        if name != "out" or self.number == self.number:
            return
        hidden = self.must_show & ~self._rows(actual.isnan().any(-1))
        where = hidden.nonzero()[:1].tolist()
        assert not where, f"{self.case}: out: the row at {where[0]} attends a NaN, but has none"

    def _free(self, name: str, actual: Tensor) -> Tensor:
        packed = self.packing is not None
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
    """Rows of scores so large that which of several keys wins is beyond an lse in float32.

    Their results must be finite, and may be any of those keys' values or a mean of them.
    """

    def __init__(self, case: Case | PackedCase, q: Tensor, k: Tensor, v: Tensor, spec: Spec):
        self.case = case
        self.packing = case.meaning() if isinstance(case, PackedCase) else None
        with torch.no_grad():
            scores = scores_of(self.packing, q, k, v, spec)
            top = scores.amax(-1, keepdim=True)
            near = scores >= top - top.abs() * torch.finfo(torch.float32).eps * 4
            self.rows = (near.sum(-1) > 1) & (top.squeeze(-1).abs() > LARGE)

    def judged(self, name: str, actual: Tensor, expected: Tensor) -> Tensor:
        finite = torch.isfinite(actual) | ~torch.isfinite(expected)
        assert bool(finite.all()), f"{self.case}: {name} is not finite"
        if name != "out":
            return actual
        rows = self.rows if self.packing is None else self.rows[0].transpose(0, 1)
        return torch.where(rows.unsqueeze(-1), expected.to(actual.dtype), actual)


class CachePoison:
    """The same for a call over a cache: a NaN or Inf in a query, or in a key or value in use."""

    def __init__(self, case, q: Tensor, k: Tensor, v: Tensor, cache: Cache, spec: Spec) -> None:
        """Read a clean call, after its new keys were written."""
        self.case, (number, self.operand) = case, case.poison.split()
        self.number, self.random = float(number), torch.Generator().manual_seed(case.seed + 3)
        self.attends, self.certain = [], []

        def attend(q, k, v, spec):
            k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = reference.modify_scores(q @ k.transpose(-1, -2), spec, q.shape[-1])
            self.attends.append(scores[0] > float("-inf"))
            self.certain.append(reference.weights(scores, spec.sinks)[0][0] > WEIGHT)
            return q, q[..., 0]

        reference.cached(q, k, v, cache._replace(key=None), longer(spec, cache), attend)
        self.rows = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
        self.must_show = torch.zeros_like(self.rows)

    def write(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> None:
        """Into one row of the operand."""
        b = self._draw(len(q))
        if self.operand == "query":
            h, i = self._draw(q.shape[1]), self._draw(q.shape[2])
            q[b, h, i, self._draw(q.shape[3])] = self.number
            self.rows[b, h, i] = True
            self.must_show[b, h, i] = self.attends[b][h, i].any()
            return
        keys = self.attends[b].shape[2] - (0 if cache.key is None else cache.key.shape[2])
        if keys <= 0:
            return
        j, h = self._draw(keys), self._draw(k.shape[1 if cache.page_table is None else 2])
        memory = k if self.operand == "key" else v
        number = torch.tensor(self.number, device=k.device).to(memory.dtype)
        view, index = reference.slots(memory, cache, b, j, j + 1)
        row = view[index]
        row[:, h, self._draw(v.shape[3])] = number.view(view.dtype)
        view[index] = row
        heads = slice(h * q.shape[1] // row.shape[1], (h + 1) * q.shape[1] // row.shape[1])
        self.rows[b, heads] = self.attends[b][heads, :, j]
        if not (self.case.fp8 and q.device.type == "cpu"):  # Triton's interpreter has no fp8 NaN
            self.must_show[b, heads] = self.certain[b][heads, :, j]

    _draw, _rows = Poison._draw, Poison._rows
    _assert_shows = Poison._assert_shows

    def judged(self, name: str, actual: Tensor, expected: Tensor) -> Tensor:
        self._assert_shows(name, actual)
        free = self.rows.unsqueeze(-1) if name == "out" else self.rows
        return torch.where(free, expected.to(actual.dtype), actual)
