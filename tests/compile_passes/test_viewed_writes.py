"""Random operations in place on views of the scores, fused or not, give the results of eager mode."""

from __future__ import annotations

import random

import torch

from tests.compile_passes.helpers import fuse, results

B, H, S, D = 2, 2, 6, 4
WRITES = ("mul_(0.5)", "add_(0.3)", "sub_(1.0)", "clamp_(-1, 1)", "fill_(-0.5)", "zero_()")
PARTS = ("[..., 1:]", "[0]", "[:, 1:]", "[None]", "[[0]]")  # the last one copies
VIEWS = ("mT", "transpose(0, 1)", "unsqueeze(0)", f"view({B * H}, {S}, {S})", f"view(-1, {S})")


def program(seed: int) -> str:
    """The source of a function that makes names of the scores, and writes to and reads them."""
    rng = random.Random(seed)
    kinds = ["view", "view", "write", "write", "write"]
    reads = rng.random() < 0.5
    kinds += ["part", "read"] if reads else []
    lines, names = [], ["s"]
    for n in range(rng.randint(3, 7)):
        name, kind = rng.choice(names), rng.choice(kinds)
        if kind == "view":
            view = rng.choice(VIEWS) if name == "s" else rng.choice(VIEWS[:3])
            lines.append(f"v{n} = {name}.{view}")
            names.append(f"v{n}")
        elif kind == "part":
            lines.append(f"v{n} = {name}{rng.choice(PARTS[:4])}")
            names.append(f"v{n}")
        elif kind == "write":
            part = rng.choice(("", "", *PARTS)) if reads else ""
            write = rng.choice(WRITES if reads else WRITES[:3])
            lines.append(f"{name}{part}.{write}")
        else:
            lines.append(f"total = total + {name}.sum()")
    if reads and rng.random() < 0.3:
        lines.append(f"total = total + {rng.choice(names)}.amax()")
    first = ["def attend(q, k, v):", "total, s = 0.0, q @ k.mT * 0.3"]
    return "\n    ".join([*first, *lines, "return s.softmax(-1) @ v + total"])


def test_random_programs():
    fused = 0
    for seed in range(24):
        source, space = program(seed), {}
        exec(source, space)
        torch.manual_seed(seed)
        inputs = tuple(torch.randn(B, H, S, D) for _ in range(3))
        for train in (False, True):
            try:
                expected = results(space["attend"], inputs, train)
            except RuntimeError:  # an operation needs what a later one has overwritten
                continue
            fusion = fuse(space["attend"])
            actual = results(fusion.run, inputs, train)
            fused += fusion.fused
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5, msg=source)
    assert fused >= 8, "views that nothing else reads are followed"
