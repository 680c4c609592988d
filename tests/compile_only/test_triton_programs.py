"""Programs in the Triton kernels, compiled without a GPU: they fit; the forward spills nothing."""

from __future__ import annotations

import importlib

import pytest
import torch

triton = pytest.importorskip("triton", reason="compiles Triton's kernels")


from fa_ops.backends.triton import launch  # noqa: E402
from fa_ops.call.call import Saved, attention_call  # noqa: E402
from fa_ops.programs.program import parse  # noqa: E402
from tests.compile_only.sass import assert_fits  # noqa: E402

forward = importlib.import_module("fa_ops.backends.triton.forward")
backward = importlib.import_module("fa_ops.backends.triton.backward")
tiles = importlib.import_module("fa_ops.backends.triton.tiles")

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing: unset TRITON_INTERPRET"
)

B, H, S = 2, 4, 256
PROGRAMS = {
    "distance": "fa1\nt0 float distance h grad\nx0 add(score, t0)\nscore x0\n",
    "row and column": (
        "fa1\nt0 float column bh grad\nt1 float row bh grad\nx0 add(score, t1)\nx1 sub(x0, t0)\n"
        "score x1\n"
    ),
    "all": (
        "fa1\nt0 float tile h grad\nt1 int row b\nt2 int column b\nt3 int blocks:128x128 h\n"
        "x0 eq(t1, t2)\nx1 eq(t3, 0)\nx2 not(x1)\nx3 and(x0, x2)\nx4 sub(q, k)\nx5 mod(x4, 3)\n"
        "x6 eq(x5, 0)\nx7 and(x3, x6)\nx8 mul(score, t0)\nx9 tanh(x8)\nmask x7\nscore x9\n"
    ),
}  # fmt: skip


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def call_of(name: str, D: int, saved: Saved | None = None):
    program = parse(PROGRAMS[name])
    _, floats = program.places("float", B, H, S, S)
    _, ints = program.places("int", B, H, S, S)
    q = meta(B, H, S, D)
    return attention_call(
        q, q, q, saved=saved, program=PROGRAMS[name], is_causal=True,
        term_values=meta(floats, dtype=torch.float32) if floats else None,
        term_indices=meta(ints, dtype=torch.int32) if ints else None,
    )  # fmt: skip


@pytest.fixture
def compiled(monkeypatch, bound):
    """compiled(arch, run): the kernels that `run` binds, compiled for `arch`."""

    def collect(arch, run):
        kernels = bound(arch, forward, backward, by_name=False)
        monkeypatch.setattr(forward, "address", lambda t: t)
        monkeypatch.setattr(
            forward, "empty", lambda size, stride, dtype, device: meta(*size, dtype=dtype)
        )
        run()
        return kernels

    return collect


@pytest.mark.parametrize(
    "name, arch, D", [("distance", 90, 128), ("all", 90, 64), ("all", 80, 128)]
)
def test_forward_fits(name, arch, D, compiled, tmp_path):
    (kernel,) = compiled(arch, lambda: forward.forward(call_of(name, D)))
    assert_fits(kernel, arch, tmp_path)


# Bytes that a thread spills: addresses of distances are one for each score.
SPILLS = {"distance": 416, "row and column": 120}
if launch.VERSION >= (3, 9):
    SPILLS["row and column"] = 152
elif launch.VERSION >= (3, 8):
    SPILLS["distance"] = 448


@pytest.mark.parametrize("name", SPILLS)
def test_backward_fits(name, compiled, tmp_path):
    D = 64
    grad, lse = meta(B, H, S, D), meta(B, H, S, dtype=torch.float32)
    saved = Saved(grad, None, grad, lse)
    kernels = compiled(90, lambda: backward.backward(call_of(name, D, saved)))
    assert len(kernels) == 2 + sum(term.grad for term in parse(PROGRAMS[name]).terms)
    for kernel in kernels:
        assert_fits(kernel, 90, tmp_path, SPILLS[name])


@pytest.mark.parametrize("arch", [80, 90])
def test_tiles_fit(arch, bound, tmp_path):
    kernels = bound(arch, tiles)
    program = parse(PROGRAMS["all"])
    values, indices = (
        meta(program.places(type, B, H, S, S)[1], dtype=dtype)
        for type, dtype in (("float", torch.float32), ("int", torch.int32))
    )
    tiles.program_tiles(PROGRAMS["all"], values, indices, (B, H, S, S), torch.device("meta"))
    assert len(kernels) == 2
    for kernel in kernels.values():
        assert_fits(kernel, arch, tmp_path)
