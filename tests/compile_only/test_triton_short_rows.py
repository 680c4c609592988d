"""The kernels of short rows with a bias without a GPU: registers, shared memory, instructions."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="compiles Triton's kernels")

from triton.backends.compiler import GPUTarget  # noqa: E402

from fa_ops.backends.triton import launch, short_rows  # noqa: E402
from fa_ops.backends.triton.configs import holds_short_rows  # noqa: E402
from fa_ops.call.options import Spec  # noqa: E402
from tests.compile_only.sass import assert_fits, disassembled, main_loop  # noqa: E402

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing: unset TRITON_INTERPRET"
)

B, H = 64, 4


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def compiled(monkeypatch):
    """compiled(arch, S, D, shared, backward): the kernel that the call binds, for `arch`."""

    def collect(arch, S, D, shared=True, backward=False):
        kernels = []

        def bind(fn, args, constants, options, *, device, **details):
            target = GPUTarget("cuda", arch, 32)
            kernels.append(launch.compile_kernel(fn, args, constants, options, target, **details))
            return lambda grid, args: None

        monkeypatch.setattr(short_rows, "bind", bind)
        monkeypatch.setattr(short_rows, "_launches", {})
        q, spec = meta(B, H, S, D), Spec(meta(1 if shared else B, H, S, S))
        if backward:
            lse = meta(B, H, S, dtype=torch.float32)
            short_rows.backward(q, None, q, q, q, q, lse, spec, True)
        else:
            short_rows.forward(q, q, q, spec)
        return kernels[0]

    return collect


def assert_fits_in_the_loop(kernel, arch, folder):
    """Threads keep few values in memory in the loop over the batch."""
    assert_fits(kernel, arch, folder, 48)
    loop = main_loop(disassembled(kernel.asm["cubin"], folder))
    assert sum(name.startswith(("LDL", "STL")) for name in loop) <= 3


FORWARD = [
    *((90, *shape) for shape in [(49, 32, True), (49, 32, False), (64, 64, True)]),
    *((90, 128, 64, shared) for shared in (True, False)),
    (80, 49, 32, False),
    *((arch, 64, 64, True) for arch in (80, 100, 120)),
]
BACKWARD = [
    *((90, *shape) for shape in [(49, 32, True), (49, 32, False), (64, 64, True)]),
    (80, 49, 32, False),
    *((arch, 49, 32, True) for arch in (80, 100, 120)),
]


@pytest.mark.parametrize("arch, S, D, shared", FORWARD)
def test_forward(arch, S, D, shared, compiled, tmp_path):
    assert holds_short_rows(arch, S, D, backward=False)
    assert_fits_in_the_loop(compiled(arch, S, D, shared), arch, tmp_path)


@pytest.mark.parametrize("arch, S, D, shared", BACKWARD)
def test_backward(arch, S, D, shared, compiled, tmp_path):
    assert holds_short_rows(arch, S, D, backward=True)
    kernel = compiled(arch, S, D, shared, backward=True)
    assert_fits_in_the_loop(kernel, arch, tmp_path)
