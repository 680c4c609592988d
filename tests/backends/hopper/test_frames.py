"""How many functions of the package a call of the Hopper backend enters: most of its host time."""

import collections
import inspect
import pathlib
import sys
from functools import partial

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper
from fa_ops.backends.hopper import decode
from fa_ops.backends.hopper.runtime import launch
from fa_ops.plans import dispatch, planning

PACKAGE = pathlib.Path(fa_ops.__file__).parent
OTHERS = str(pathlib.Path(__file__).parents[2]), str(PACKAGE / "testing")
# Compiling and loading, which the driver of the tests replaces, and the maps of new addresses.
REPLACED = {
    one.__code__
    for one in (
        launch.kernel.__wrapped__, launch.kernels, launch._load_all, launch.TensorMap.__missing__
    )
}  # fmt: skip


class Frames:
    """Counts the functions of the package that are entered in a `with` block, by file and name.

    Each step of a generator counts. Functions that tests replace are left out, with all that they
    call: on a GPU they are C functions.
    """

    def __enter__(self):
        self.entered, self._depth = collections.Counter(), 0
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        code = frame.f_code
        if event == "return" and self._depth:
            self._depth -= 1
        elif event == "call":
            if self._depth or code in REPLACED or code.co_filename.startswith(OTHERS):
                self._depth += 1
            elif code.co_filename.startswith(str(PACKAGE)):
                self._enter(str(pathlib.Path(code.co_filename).relative_to(PACKAGE)), frame)

    def _enter(self, name, frame):
        self.entered[name, frame.f_code.co_name] += 1

    @property
    def count(self):
        return sum(self.entered.values())

    @property
    def files(self):
        return {name for name, _ in self.entered}


class Path(Frames):
    """The functions that are given one tensor, alone or in a tuple, in their order."""

    def __init__(self, tensor):
        self.tensor, self.steps = tensor, []

    def _enter(self, name, frame):
        code = frame.f_code
        given = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        values = [frame.f_locals.get(argument) for argument in code.co_varnames[:given]]
        if self._holds(values):
            self.steps.append((name, code.co_name))

    def _holds(self, value, depth=0):
        if value is self.tensor:
            return True
        is_nested = depth < 3 and isinstance(value, tuple | list)
        return is_nested and any(self._holds(one, depth + 1) for one in value)

    @property
    def files(self):
        """Each file when it is entered from another one."""
        names = [name for name, _ in self.steps]
        return [name for name, before in zip(names, [None, *names]) if name != before]

    @property
    def returns(self):
        """How often a file is entered that was left before."""
        return len(self.files) - len(set(self.files))

    def __str__(self):
        lines = [f"{name}: {function}" for name, function in self.steps]
        files = len(set(self.files))
        return "\n".join([*lines, f"{len(lines)} frames, {files} files, {self.returns} returns"])


def counted(call):
    with Frames() as frames:
        call()
    return frames


def attention(Sq=256, Sk=256, requires_grad=False, **options):
    """A call that can be repeated."""
    q, k, v = (
        torch.zeros(1, 8, S, 64, dtype=torch.bfloat16, requires_grad=requires_grad)
        for S in (Sq, Sk, Sk)
    )
    return partial(fa_ops.attention, q, k, v, **options)


def packed(entry_point=fa_ops.attention_varlen, requires_grad=False):
    """A packed call that can be repeated."""
    shape, options = (256, 8, 64), {"dtype": torch.bfloat16, "requires_grad": requires_grad}
    q, k, v = (torch.zeros(shape, **options) for _ in range(3))
    ends = torch.tensor([0, 100, 256], dtype=torch.int32)
    return partial(entry_point, q, k, v, ends, ends)


def operator():
    q, k, v = (torch.zeros(1, 8, 256, 64, dtype=torch.bfloat16) for _ in range(3))
    return partial(torch.ops.fa.attention, q, k, v)


def cached(append=False, **options):
    q, k, v, new = (torch.zeros(1, 8, S, 64, dtype=torch.bfloat16) for S in (1, 600, 600, 1))
    lens = torch.full((1,), 600, dtype=torch.int32)
    options |= {"key": new, "value": new.clone()} if append else {}
    return partial(fa_ops.attention_with_kv_cache, q, k, v, lens, **options)


@pytest.fixture(autouse=True)
def on_cpu(driver, monkeypatch):
    """CPU tensors go to the backend, and their values are not checked, as those of CUDA tensors."""
    driver.struct_bytes = 576
    monkeypatch.setattr(hopper, "support_error", lambda *call: None)
    monkeypatch.setattr(hopper, "cache_error", decode.cache_error)
    monkeypatch.setattr(dispatch, "AUTO", {"cpu": ("hopper",)})
    monkeypatch.setattr(dispatch, "_available", {"hopper": None})
    monkeypatch.setattr(planning, "_check_of_values", lambda call: None)
    attention(Sq=128)()  # imports what is imported late


# A call, and how many functions it may enter when it is repeated.
CALLS = {
    "forward": (attention(), 10),
    "with lse": (attention(return_lse=True), 10),
    "causal": (attention(is_causal=True), 12),  # tiles are handed out on demand
    "recorded": (attention(requires_grad=True), 11),
    "bool mask": (attention(attn_mask=torch.ones(1, 1, 256, 256, dtype=torch.bool)), 17),
    "dropout": (attention(dropout_p=0.5), 26),
    "operator": (operator(), 20),
    "packed": (packed(), 18),
    "packed, recorded": (packed(requires_grad=True), 19),
    "packed operator": (packed(torch.ops.fa.attention_varlen), 28),
    "decoding": (attention(Sq=1, Sk=600), 12),
    "cached": (cached(), 12),
    "appended": (cached(append=True), 20),
    "appended, rotated": (
        cached(append=True, rotary_cos=torch.zeros(600, 32), rotary_sin=torch.zeros(600, 32)),
        20,
    ),
    "recorded under autocast": (attention(requires_grad=True), 22),
    "packed under autocast": (packed(requires_grad=True), 38),
    "cached under autocast": (cached(), 22),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_enters_few_functions(name):
    call, limit = CALLS[name]
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in name):
        for _ in range(2):
            call()
        frames = counted(call)
        assert 8 < frames.count <= limit and len(frames.files) <= 10, frames.entered
        assert counted(call).entered == frames.entered


@pytest.mark.parametrize("autocast", [False, True])
def test_a_repeated_backward_pass_enters_few_functions(autocast):
    for _ in range(2):
        out = attention(requires_grad=True)()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            frames = counted(partial(out.backward, torch.zeros_like(out)))
    limit = 15 if autocast else 13  # a single launch
    assert 10 < frames.count <= limit and len(frames.files) <= 6, frames.entered


def test_a_first_forward_enters_few_functions():
    call, limit = CALLS["forward"]
    frames = counted(call)
    assert limit < frames.count <= 111 and len(frames.files) <= 17, frames.entered


def test_the_query_of_a_first_call_has_a_short_path():
    """`pytest -s` prints the path."""
    call, _ = CALLS["forward"]
    with Path(call.args[0]) as path:
        call()
    print(path)
    assert path.steps[0] == ("functions/attention.py", "attention")
    assert path.steps[-1] == ("backends/hopper/forward.py", "run")
    assert len(path.steps) <= 40 and len(set(path.files)) <= 12 and path.returns <= 16, str(path)
