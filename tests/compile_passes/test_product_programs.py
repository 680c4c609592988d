"""Random products of query, key and value, over random dimensions of cubes, fused and eager.

All sizes are equal, so that they identify no dimension. Most programs are no attention; what is
fused must give the same results and gradients.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from tests.compile_passes.helpers import fuse

N = 3  # the size of every dimension
LETTERS = "abcd"


def product(r: random.Random, rank: int, x: str, y: str) -> str:
    """A product of two cubes, as code."""
    matrix = y + "[0]" * (rank - 2)
    kind = r.choice("einsum tensordot inner linear sum sum sum matmul swapped".split())
    if kind == "einsum":
        a, b = LETTERS[:rank], list(LETTERS[:rank])
        b[r.randrange(rank)] = "z"
        r.shuffle(b)
        summed = r.choice([x for x in a if x in b])
        out = [x for x in dict.fromkeys([*a, *b]) if x != summed]
        r.shuffle(out)
        form = r.choice("equation equation lists vector".split())
        if form == "lists":
            first, second, last = ([ord(n) - ord("a") for n in term] for term in (a, b, out))
            return f"torch.einsum({x}, {first}, {y}, {second}, {last})"
        if form == "vector":
            label, vector = r.choice([*a, *b]), x + "[0]" * (rank - 1)
            terms = f"{a},{''.join(b)},{label}->{''.join(out)}"
            return f'torch.einsum("{terms}", {x}, {y}, {vector})'
        return f'torch.einsum("{a},{"".join(b)}->{"".join(out)}", {x}, {y})'
    if kind == "sum":
        first, second, dim = (r.randrange(-rank - 1, rank + 1) for _ in range(3))
        return f"({x}.unsqueeze({first}) * {y}.unsqueeze({second})).sum({dim})"
    if kind == "tensordot":
        dims = [r.randrange(rank)], [r.randrange(2)]
        return f"torch.tensordot({x}, {matrix}, dims={dims})"
    return {
        "inner": f"torch.inner({x}, {matrix})",
        "linear": f"F.linear({x}, {matrix}{r.choice(['', '.t()'])})",
        "matmul": f"({x} @ {y}.mT)",
        "swapped": f"({y} @ {x}.mT)",
    }[kind]


def weights(r: random.Random, rank: int) -> list[str]:
    """Weights `w` of the scores `s`, as code."""
    dim = r.choice([-1, -1, -1, r.randrange(-rank, rank)])
    mask = f"torch.ones({N}, {N}, dtype=s.dtype).tril()"
    letters = LETTERS[:rank]
    left = letters.replace(letters[dim], "")
    return r.choice(
        [
            [f"w = s.softmax({dim})"],
            ["e = s.exp()", f"w = e / e.sum({dim}, keepdim=True)"],
            ["e = s.exp()", f"w = e / e.mean({dim}, keepdim=True)"],
            ["e = s.exp()", f'w = e / torch.einsum("{letters}->{left}", e).unsqueeze({dim})'],
            ["e = s.exp()", f"w = e / (e @ torch.ones({N}, 1, dtype=s.dtype))"],
            [f"e = s.exp() * {mask}", f"w = e / e.sum({dim}, keepdim=True)"],
            ["e = s.exp()", f"w = e / (e * {mask}).sum({dim}, keepdim=True)"],
        ]
    )


def program(seed: int) -> tuple[str, int]:
    """The code of a function of q, k and v, and their number of dimensions."""
    r = random.Random(seed)
    rank = r.choice([2, 3, 3, 4])
    operands = ["w", "v"] if r.random() < 0.75 else ["v", "w"]
    lines = [
        f"s = {product(r, rank, 'q', 'k')} * 0.3",
        *weights(r, rank),
        f"return {product(r, rank, *operands)}",
    ]
    return "def function(q, k, v):\n    " + "\n    ".join(lines) + "\n", rank


def gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    loss = out.sin().sum()
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_random_products_are_fused_only_where_they_are_attention(first):
    fused = 0
    for seed in range(first, first + 40):
        code, rank = program(seed)
        names = {"torch": torch, "F": F}
        exec(code, names)
        g = torch.Generator().manual_seed(seed)
        inputs = [
            torch.randn([N] * rank, generator=g, dtype=torch.float64).requires_grad_()
            for _ in range(3)
        ]
        try:
            expected = names["function"](*inputs)
        except RuntimeError:  # a dimension of size 1 where another was summed
            continue
        fusion = fuse(names["function"])
        found = fusion.run(*inputs)
        if not fusion.fused:
            continue
        fused += 1
        assert found.stride() == expected.stride(), (seed, code)
        given = (found, *gradients(found, inputs)), (expected, *gradients(expected, inputs))
        for a, b in zip(*given):
            torch.testing.assert_close(a, b, msg=lambda m, code=code: f"{code}{m}")
    assert fused >= 5
