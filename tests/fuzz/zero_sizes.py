"""Call every operator with a size of 0 in every dimension, and print each call before it is made:

    python -m tests.fuzz.zero_sizes cpu cpu

This runs in a separate process, as an integer division by zero in a kernel would end it. Exits with
status 1 after a wrong result.
"""

from __future__ import annotations

import itertools
import sys

import torch

import fa_ops

SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "Sq": 3, "Sk": 5, "D": 8, "Dv": 16}
CACHED = SIZES | {"new": 2}
CALLS = 3


def smaller(sizes: dict[str, int]) -> list[dict[str, int]]:
    """All variants of the sizes with one or two of them set to 0."""
    zeros = [*itertools.combinations(sizes, 1), *itertools.combinations(sizes, 2)]
    return [sizes | dict.fromkeys(names, 0) for names in zeros]


def results(call) -> list:
    """The result of each repeated call, or the message of its error."""
    values = []
    for _ in range(CALLS):
        try:
            values.append(call())
        except (ValueError, NotImplementedError) as error:
            values.append(str(error))
    return values


def dense(backend: str, device: str, **n: int):
    q = torch.randn(n["B"], n["Hq"], n["Sq"], n["D"], device=device, requires_grad=True)
    k = torch.randn(n["B"], n["Hkv"], n["Sk"], n["D"], device=device, requires_grad=True)
    v = torch.randn(n["B"], n["Hkv"], n["Sk"], n["Dv"], device=device, requires_grad=True)

    def call():
        out, lse = fa_ops.attention(q, k, v, is_causal=True, return_lse=True, backend=backend)
        other = fa_ops.attention(q, k, v, is_causal=True, backend=backend)
        grads = torch.autograd.grad(other.sum(), (q, k, v))
        return [out, lse, other, *grads], n["Sk"] == 0

    return call


def packed(backend: str, device: str, **n: int):
    q = torch.randn(n["Sq"], n["Hq"], n["D"], device=device, requires_grad=True)
    k = torch.randn(n["Sk"], n["Hkv"], n["D"], device=device, requires_grad=True)
    v = torch.randn(n["Sk"], n["Hkv"], n["Dv"], device=device, requires_grad=True)
    ends = [
        torch.tensor([0] * n["B"] + [tokens], dtype=torch.int32, device=device)
        for tokens in (n["Sq"], n["Sk"])
    ]

    def call():
        out, lse = fa_ops.attention_varlen(q, k, v, *ends, return_lse=True, backend=backend)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        return [out, lse, *grads], n["Sk"] == 0 or n["B"] == 0

    return call


def cached(backend: str, device: str, page_size: int = 0, **n: int):
    shape = (n["B"], n["Hkv"], n["Sk"] + n["new"])
    table = None
    if page_size:
        shape = (3, page_size, n["Hkv"])
        table = torch.arange(2 * n["B"], dtype=torch.int32, device=device).view(n["B"], 2) % 3
    k, v = (torch.randn(*shape, n[d], device=device) for d in ("D", "Dv"))
    q = torch.randn(n["B"], n["Hq"], n["Sq"], n["D"], device=device)
    lens = torch.full((n["B"],), min(n["Sk"], 3), dtype=torch.int32, device=device)
    new = {}
    if n["new"] or n["Sk"]:
        sizes = (n["B"], n["Hkv"], n["new"])
        new = {
            "key": torch.randn(*sizes, n["D"], device=device),
            "value": torch.randn(*sizes, n["Dv"], device=device),
        }

    def call():
        out, lse = fa_ops.attention_with_kv_cache(
            q, k, v, lens, table, return_lse=True, backend=backend, **new
        )
        return [out, lse], not page_size and n["Sk"] + n["new"] == 0

    return call


def main(backend: str, device: str) -> int:
    wrong = 0
    kinds = [(dense, SIZES, {}), (packed, SIZES, {}), (cached, CACHED, {})]
    kinds.append((cached, CACHED, {"page_size": 4}))
    for function, sizes, more in kinds:
        for case in smaller(sizes):
            line = f"{function.__name__}({', '.join(f'{k}={v}' for k, v in (case | more).items())})"
            print(line, flush=True)
            problem = _problem(results(function(backend, device, **case, **more)))
            if problem:
                wrong += 1
                print(f"WRONG: {line}: {problem}", flush=True)
    return int(wrong > 0)


def _problem(results: list) -> str | None:
    first, *others = results
    if isinstance(first, str):
        return None if all(other == first for other in others) else f"refused once: {results}"
    tensors, no_keys = first
    for other in others:
        if isinstance(other, str) or not all(map(torch.equal, tensors, other[0])):
            return "differs when it is repeated"
    out, lse = tensors[:2]
    if no_keys and (out.any() or (lse != -torch.inf).any()):
        return "without keys out must be 0 and lse -inf"
    return "NaN" if any(x.isnan().any() for x in tensors) else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
