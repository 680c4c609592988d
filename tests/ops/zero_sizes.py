"""Every operator with every size at zero, against the oracle; run as a process of its own.

    python -m tests.ops.zero_sizes [backend [device [PART/PARTS]]]

A kernel that divides by a size ends the process, which a test beside it would not survive.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator

import torch

import fa_ops

INT = torch.int32
OPTIONS = [
    {},
    {"is_causal": True},
    {"softcap": 2.0, "window": (1, 0)},
    {"sinks": True},
    {"alibi_slopes": True, "scale": 0.3},
]


def options_of(options: dict, B: int, Hq: int) -> dict:
    """The options with their tensors."""
    made = dict(options)
    if "sinks" in made:
        made["sinks"] = torch.randn(Hq, requires_grad=True)
    if "alibi_slopes" in made:
        made["alibi_slopes"] = torch.rand(B, Hq)
    return made


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def check(name: str, call, inputs: list[torch.Tensor], backend: str | None) -> None:
    """Compare a backend's results and gradients with the oracle's."""
    found = []
    for one in (backend, "reference"):
        results = call(backend=one)
        out, lse = results[:2]
        loss = out.double().sum() + lse.masked_fill(lse == -torch.inf, 0.0).double().sum()
        wanted = [x for x in inputs if x.requires_grad]
        grads = torch.autograd.grad(loss, wanted) if loss.requires_grad else ()
        found.append((*results, *grads))
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, name
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{name}: {text}")


def dense() -> Iterator[tuple]:
    sizes = itertools.product((0, 2), (0, 1, 3), (0, 1, 5), (1, 8), (1, 6))
    for (B, Sq, Sk, D, Dv), options, mask in itertools.product(sizes, OPTIONS, (None, 1, 2)):
        given = options_of(options, B, 4)
        inputs = [draw(B, 4, Sq, D), draw(B, 2, Sk, D), draw(B, 2, Sk, Dv)]
        if mask:
            given["attn_mask"] = draw(Sq, Sk) if mask == 1 else torch.rand(B, 1, Sq, Sk) > 0.5
        else:
            given["kv_lens"] = torch.zeros(B, dtype=INT)
        inputs += [x for x in given.values() if torch.is_tensor(x)]
        yield f"dense {B, Sq, Sk, D, Dv, given.keys()}", fa_ops.attention, inputs[:3], given, inputs


def packed() -> Iterator[tuple]:
    lengths = [(), (0,), (0, 0), (3, 0), (0, 3), (2, 2)]
    pairs = [(q, k) for q, k in itertools.product(lengths, lengths) if len(q) == len(k)]
    for (q, k), options, margin in itertools.product(pairs, OPTIONS, (0, 1)):
        given = options_of(options, len(q), 4)
        ends = [torch.tensor([0, *x]).cumsum(0).add(margin).to(INT) for x in (q, k)]
        Tq, Tk = (int(x[-1]) + margin for x in ends)
        inputs = [draw(Tq, 4, 8), draw(Tk, 2, 8), draw(Tk, 2, 6)]
        inputs += [x for x in given.values() if torch.is_tensor(x)]
        name = f"packed {q, k, margin, given.keys()}"
        yield name, fa_ops.attention_varlen, [*inputs[:3], *ends], given, inputs


def cached() -> Iterator[tuple]:
    sizes = itertools.product((0, 2), (0, 1, 3), (0, 1, 6), (0, 1), (None, 0, 1, 4), (False, True))
    for (B, Sq, S, Sn, page, turn), options in itertools.product(sizes, OPTIONS):
        given = {n: x.detach() if torch.is_tensor(x) else x
                 for n, x in options_of(options, B, 4).items()}  # fmt: skip
        columns = -(-S // page) if page else 0
        room = S if page is None else columns * (page or 0)
        if page is None:
            caches = [torch.randn(B, 2, S, 8), torch.randn(B, 2, S, 6)]
        else:
            shape = (B * columns + 1, page or 1, 2)
            caches = [torch.randn(*shape, 8), torch.randn(*shape, 6)]
            table = torch.arange(B * columns, dtype=INT).view(B, columns)
            given["page_table"] = table
        lens = torch.zeros(B, dtype=INT) if room <= Sn else torch.ones(B, dtype=INT)
        if room >= Sn or not B:
            given |= {"key": torch.randn(B, 2, Sn, 8), "value": torch.randn(B, 2, Sn, 6)}
        if turn:
            given |= {"rotary_cos": torch.rand(7, 0), "rotary_sin": torch.rand(7, 0)}
            given["rotary_interleaved"] = bool(Sq % 2)
        name = f"cached {B, Sq, S, Sn, page, given.keys()}"
        yield name, torch.randn(B, 4, Sq, 8), caches, lens, given


def over_cache(q, caches, lens, given, backend=None) -> tuple:
    memory = [x.clone() for x in caches]
    options = given | {"return_lse": True, "backend": backend}
    return *fa_ops.attention_with_kv_cache(q, *memory, lens, **options), *memory


def merged() -> Iterator[None]:
    """Checked against torch's own functions."""
    for N, rows, Dv in itertools.product((1, 2), ((), (0,), (3, 0), (5,)), (0, 1, 4)):
        outs, lses = draw(N, *rows, Dv), draw(N, *rows)
        out, lse = fa_ops.merge_states(outs, lses)
        torch.testing.assert_close(lse, lses.logsumexp(0))
        assert out.shape == (*rows, Dv)
        grads = torch.autograd.grad(out.sum() + lse.sum(), (outs, lses))
        assert all(g.shape == x.shape and g.isfinite().all() for g, x in zip(grads, (outs, lses)))
        yield


def main(backend: str | None = None, device: str = "cpu", part: str = "0/1") -> None:
    torch.set_default_device(device)
    torch.manual_seed(0)
    first, step = map(int, part.split("/"))
    count = sum(1 for _ in merged())
    calls = itertools.chain(dense(), packed())
    for name, call, args, given, inputs in itertools.islice(calls, first, None, step):
        check(name, functools.partial(call, *args, **given, return_lse=True), inputs, backend)
        count += 1
    for name, *call in itertools.islice(cached(), first, None, step):
        check(name, functools.partial(over_cache, *call), [], backend)
        count += 1
    print(count, "calls")


if __name__ == "__main__":
    main(*sys.argv[1:])
