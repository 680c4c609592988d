"""The kernels of short rows with a bias without a GPU: registers, shared memory, instructions."""

import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="compiles Triton's kernels")


from fa_ops.backends.triton import launch, short_rows  # noqa: E402
from fa_ops.backends.triton.configs import holds_short_rows  # noqa: E402
from fa_ops.call.call import Saved, attention_call  # noqa: E402
from fa_ops.call.options import Operands  # noqa: E402
from tests.compile_only.sass import assert_fits, disassembled, main_loop  # noqa: E402

pytestmark = pytest.mark.skipif(
    launch.INTERPRETED, reason="the interpreter compiles nothing: unset TRITON_INTERPRET"
)

B, H = 64, 4


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def compiled(bound):
    """compiled(arch, S, D, shared, backward): the kernel that the call binds, for `arch`."""

    def collect(arch, S, D, shared=True, backward=False):
        kernels = bound(arch, short_rows, by_name=False)
        q = meta(B, H, S, D)
        call = attention_call(q, q, q, attn_mask=meta(1 if shared else B, H, S, S))
        if backward:
            lse = meta(B, H, S, dtype=torch.float32)
            short_rows.backward(call._replace(saved=Saved(q, None, q, lse, True)))
        else:
            short_rows.forward(call)
        return kernels[0]

    return collect


def assert_fits_in_the_loop(kernel, arch, folder):
    """Threads keep few values in memory in the loop over the batch; more with some releases."""
    more = {(3, 6): (144, 34), (3, 8): (48, 7), (3, 9): (80, 19)}
    stack, accesses = more.get(launch.VERSION, (48, 3))
    assert_fits(kernel, arch, folder, stack)
    loop = main_loop(disassembled(kernel.asm["cubin"], folder))
    assert sum(name.startswith(("LDL", "STL")) for name in loop) <= accesses


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


@pytest.fixture
def launched(monkeypatch):
    """The arguments of each launch of a call of CPU tensors, none of which runs."""
    noted = []
    monkeypatch.setattr(short_rows, "bind", lambda *of, **options: lambda grid, args: note(args))
    monkeypatch.setattr(short_rows, "_launches", {})
    note = noted.append
    return noted


def tensors(shift=0, shared=True):
    """q, k, v and a bias; with a `shift` q does not begin at a multiple of 16 bytes."""
    size = B * H * 49 * 32
    memory = torch.zeros(3, size + 8, dtype=torch.bfloat16)
    q, k, v = (x[i : i + size].view(B, H, 49, 32) for x, i in zip(memory, (shift, 0, 0)))
    return q, k, v, torch.zeros(1 if shared else B, H, 49, 49, dtype=torch.bfloat16)


def prepared(backward, shared=True):
    """() -> what runs calls with the geometry of `tensors`, forward or backward."""
    q, k, v, bias = tensors(shared=shared)
    call = attention_call(q, k, v, attn_mask=bias)
    if not backward:
        run = short_rows.prepare(call)
        return lambda q, k, v, bias: run(q, k, v, Operands(bias))
    lse = torch.zeros(B, H, 49)
    run = short_rows.prepare_backward(call._replace(saved=Saved(q, None, q, lse, True)))
    return lambda q, k, v, bias: run(q, None, q, k, v, q, lse, Operands(bias))


@pytest.mark.parametrize("backward, limit", [(False, 5), (True, 10)])
def test_a_prepared_call_enters_few_functions(launched, backward, limit):
    run, given, entered = prepared(backward), tensors(), []
    folder = short_rows.__file__.removesuffix("short_rows.py")

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        run(*given)
    finally:
        sys.setprofile(None)
    assert 3 < len(entered) <= limit, entered
    q, k, v, bias = given
    (args,) = launched
    assert args[:3] == (q, k, v) and any(x is bias for x in args)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_prepared_call_copies_what_is_not_aligned(launched, backward, shared):
    run = prepared(backward, shared)
    for shift in (0, 1, 0):
        q, k, v, bias = tensors(shift, shared)
        results = run(q, k, v, bias)
        args = launched[-1]
        assert (args[0] is q) == (shift == 0) and args[0].data_ptr() % 16 == 0
        assert results[0].shape == q.shape and (not backward or results[3].shape == bias.shape)
    first, other, again = launched
    numbers = [[x for x in args if not isinstance(x, torch.Tensor)] for args in launched]
    assert numbers[0] == numbers[2] and len(first) == len(other) == len(again)
