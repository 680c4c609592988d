"""Calls with sizes of 0, compared with the oracle, each printed before it is made:

    python -m tests.fuzz.zero_sizes [backend [device [PART/PARTS]]]

This runs in a separate process, as an integer division by zero in a kernel would end it. Exits with
status 1 after a wrong result. Values that sizes of 0 imply are in `tests/ops/test_zero_sized.py`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import fa_ops

INT = torch.int32
SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "Sq": 3, "Sk": 5, "D": 8, "Dv": 6}
OPTIONS = (
    {},
    {"is_causal": True},
    {"softcap": 2.0, "window": (1, 0)},
    {"sinks": True},
    {"alibi_slopes": True, "scale": 0.3},
)


class Case(NamedTuple):
    """A call of any backend, the tensors to differentiate by, and a name that describes it."""

    name: str
    call: Callable[[str | None], tuple[Tensor, ...]]  # out, lse, and what is written in place
    leaves: list[Tensor]


def with_zeros(sizes: dict[str, int]) -> list[dict[str, int]]:
    """All variants of the sizes with one or two of them set to 0."""
    zeros = [*itertools.combinations(sizes, 1), *itertools.combinations(sizes, 2)]
    return [sizes | dict.fromkeys(names, 0) for names in zeros]


def grid(**values: tuple[int, ...]) -> list[dict[str, int]]:
    """All combinations of these values of some sizes."""
    return [SIZES | dict(zip(values, some)) for some in itertools.product(*values.values())]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def with_tensors(options: dict, B: int, Hq: int) -> dict:
    """The options, with tensors in place of True."""
    tensors = {"sinks": draw(Hq), "alibi_slopes": torch.rand(B, Hq)}
    return options | {name: x for name, x in tensors.items() if name in options}


def attention_case(kind: str, function, inputs: list, options: dict, sizes: object) -> Case:
    """A case of a function of tensors, options, return_lse and backend."""

    def call(backend: str | None) -> tuple[Tensor, ...]:
        return function(*inputs, **options, return_lse=True, backend=backend)

    tensors = [x for x in (*inputs, *options.values()) if torch.is_tensor(x)]
    name = f"{kind} {sizes} {sorted(options)}"
    return Case(name, call, [x for x in tensors if x.requires_grad])


def dense() -> Iterator[Case]:
    some = grid(B=(0, 2), Sq=(0, 1, 3), Sk=(0, 1, 5), D=(1, 8), Dv=(1, 6))
    calls = list(itertools.product(some, OPTIONS, (None, "float", "bool")))
    calls += itertools.product(with_zeros(SIZES), ({"is_causal": True},), (None,))
    for n, options, mask in calls:
        B, Hq, Sq, Sk = n["B"], n["Hq"], n["Sq"], n["Sk"]
        options = with_tensors(options, B, Hq)
        if mask == "float":
            options["attn_mask"] = draw(Sq, Sk)
        elif mask == "bool":
            options["attn_mask"] = torch.rand(B, 1, Sq, Sk) > 0.5
        elif n in some:
            options["kv_lens"] = torch.zeros(B, dtype=INT)
        inputs = [draw(B, Hq, Sq, n["D"])]
        inputs += [draw(B, n["Hkv"], Sk, n[dim]) for dim in ("D", "Dv")]
        yield attention_case("dense", fa_ops.attention, inputs, options, n)


def packed() -> Iterator[Case]:
    lengths = [(), (0,), (0, 0), (3, 0), (0, 3), (2, 2)]
    pairs = [pair for pair in itertools.product(lengths, lengths) if len(pair[0]) == len(pair[1])]
    calls = list(itertools.product([SIZES], pairs, OPTIONS, (0, 1)))
    for n in with_zeros(SIZES):
        tokens = [(*[0] * (n["B"] - 1), n[name])[: n["B"]] for name in ("Sq", "Sk")]
        calls.append((n, tokens, {}, 0))
    for n, pair, options, margin in calls:
        ends = [torch.tensor([0, *x]).cumsum(0).add(margin).to(INT) for x in pair]
        Tq, Tk = (int(x[-1]) + margin for x in ends)
        inputs = [draw(Tq, n["Hq"], n["D"])]
        inputs += [draw(Tk, n["Hkv"], n[dim]) for dim in ("D", "Dv")]
        options = with_tensors(options, len(pair[0]), n["Hq"])
        name = "packed", fa_ops.attention_varlen, [*inputs, *ends], options
        yield attention_case(*name, (n, pair, margin))


def cached() -> Iterator[Case]:
    sizes = SIZES | {"new": 1}
    some = [
        n | {"new": new}
        for n, new in itertools.product(grid(B=(0, 2), Sq=(0, 1, 3), Sk=(0, 1, 6)), (0, 1))
    ]
    calls = list(itertools.product(some, OPTIONS, (None, 0, 1, 4), (False, True)))
    calls += itertools.product(with_zeros(sizes), ({},), (None, 4), (False,))
    for n, options, page, rotates in calls:
        yield cached_case(n, options, page, rotates)


def cached_case(n: dict[str, int], options: dict, page: int | None, rotates: bool) -> Case:
    """`page`: keys of a page; None: a contiguous cache."""
    B, Hq, Hkv, Sk, new = n["B"], n["Hq"], n["Hkv"], n["Sk"], n["new"]
    options = with_tensors(options, B, Hq)
    columns = -(-Sk // page) if page else 0
    room = Sk if page is None else columns * page
    shape = (B, Hkv, Sk) if page is None else (B * columns + 1, page or 1, Hkv)
    caches = [torch.randn(*shape, n[dim]) for dim in ("D", "Dv")]
    if page is not None:
        options["page_table"] = torch.arange(B * columns, dtype=INT).view(B, columns)
    lens = torch.zeros(B, dtype=INT) if room <= new else torch.ones(B, dtype=INT)
    if room >= new or not B:
        options |= {"key": torch.randn(B, Hkv, new, n["D"])}
        options |= {"value": torch.randn(B, Hkv, new, n["Dv"])}
    if rotates:
        options |= {"rotary_cos": torch.rand(7, 0), "rotary_sin": torch.rand(7, 0)}
        options["rotary_interleaved"] = bool(n["Sq"] % 2)
    if "sinks" in options:
        options["sinks"] = options["sinks"].detach()
    q = torch.randn(B, Hq, n["Sq"], n["D"])

    def attend(*, return_lse: bool, backend: str | None) -> tuple[Tensor, ...]:
        memory = [x.clone() for x in caches]
        results = fa_ops.attention_with_kv_cache(
            q, *memory, lens, return_lse=return_lse, backend=backend, **options
        )
        return *results, *memory

    return attention_case("cached", attend, [], {}, (n, page, sorted(options)))


def merged() -> Iterator[Case]:
    """Merging has no backend to choose; what is expected are torch's own functions."""
    for N, rows, Dv in itertools.product((1, 2), ((), (0,), (3, 0), (5,)), (0, 1, 4)):
        outs, lses = draw(N, *rows, Dv), draw(N, *rows)

        def call(backend: str | None, outs: Tensor = outs, lses: Tensor = lses) -> tuple:
            if backend != "reference":
                return fa_ops.merge_states(outs, lses)
            return (outs * lses.softmax(0)[..., None]).sum(0), lses.logsumexp(0)

        yield Case(f"merged {N, rows, Dv}", call, [outs, lses])


def outcome(case: Case, backend: str | None) -> list[Tensor] | Exception:
    """The results and gradients of a call, or its error."""
    try:
        results = case.call(backend)
    except (ValueError, NotImplementedError) as error:
        return error
    out, lse = results[:2]
    loss = out.double().sum() + lse.masked_fill(lse == -torch.inf, 0.0).double().sum()
    grads = torch.autograd.grad(loss, case.leaves) if case.leaves else ()
    return [x.detach() for x in (*results, *grads)]


def problem_of(case: Case, backend: str | None) -> str | None:
    """What is wrong with a call and its repetition, or None."""
    first, again, expected = (outcome(case, name) for name in (backend, backend, "reference"))
    if isinstance(first, Exception):
        if repr(again) != repr(first):
            return f"{first!r}, then {again!r}"
        is_refused = isinstance(first, NotImplementedError) or type(first) is type(expected)
        return None if is_refused else f"{first!r}, and {expected!r} of the oracle"
    if isinstance(expected, Exception):
        return f"the oracle raises {expected!r}"
    if isinstance(again, Exception) or not all(map(torch.equal, first, again)):
        return "differs when it is repeated"
    try:
        for actual, wanted in zip(first, expected, strict=True):
            torch.testing.assert_close(actual, wanted)
    except AssertionError as error:
        return str(error)
    return None


def main(backend: str | None = None, device: str = "cpu", part: str = "0/1") -> int:
    torch.set_default_device(device)
    first, step = map(int, part.split("/"))
    torch.manual_seed(0)
    count = wrong = 0
    cases = itertools.chain(dense(), packed(), cached(), merged())
    for case in itertools.islice(cases, first, None, step):
        print(case.name, flush=True)
        problem = problem_of(case, backend)
        count += 1
        if problem:
            wrong += 1
            print(f"WRONG: {case.name}: {problem}", flush=True)
    print(count, "calls")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
