"""Repeated calls on the CPU: which functions of torch they call, and what `dense` still runs."""

import math
import pathlib
import sys
from functools import partial

import pytest
import torch

import fa_ops
from fa_ops.backends.cpu import torch_kernel
from fa_ops.plans import planning

PACKAGE = str(pathlib.Path(fa_ops.__file__).parent)
KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
# What is read of a tensor takes a tenth of the time of an operation.
FACTS = {"numel", "stride", "tolist", "item", "data_ptr", "storage_offset", "is_inference"}
NAMES = {torch_kernel.norm: "norm", torch_kernel._kernel_backward: f"{KERNEL}_backward"}


class Operations(list):
    """Notes the functions of torch that code of the package calls in a `with` block, in order.

    And how many functions of the package are entered. A mode that sees operators would change the
    route of calls.
    """

    frames = 0

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, function):
        is_own = frame.f_code.co_filename.startswith(PACKAGE)
        if event == "call":
            self.frames += is_own
        elif event == "c_call" and function in NAMES:
            self.append(NAMES[function])
        elif event == "c_call" and is_own:
            of_tensor = isinstance(getattr(function, "__self__", None), torch.Tensor)
            if of_tensor or "_VariableFunctions" in function.__qualname__:
                self += {function.__name__} - FACTS


def tensors(Sq=32, Sk=32, heads=(4, 4), B=2, D=16, requires_grad=False):
    """Query, key and value, laid out (B, S, H, D) as projections are."""
    shapes = (B, Sq, heads[0], D), (B, Sk, heads[1], D), (B, Sk, heads[1], D)
    return [torch.randn(s).transpose(1, 2).requires_grad_(requires_grad) for s in shapes]


def attention(*sizes, requires_grad=False, heads=(4, 4), **options):
    return partial(
        fa_ops.attention, *tensors(*sizes, heads=heads, requires_grad=requires_grad), **options
    )


def cached(*lens, heads=(9, 3), **options):
    q, k, v = tensors(1, 512, heads, len(lens), 64)
    lens = torch.tensor(lens, dtype=torch.int32)
    return partial(
        fa_ops.attention_with_kv_cache, q, k.contiguous(), v.contiguous(), lens, **options
    )


def packed(requires_grad=False):
    q, k, v = (torch.randn(60, 4, 16, requires_grad=requires_grad) for _ in range(3))
    ends = torch.tensor([0, 20, 40, 60], dtype=torch.int32)
    return partial(fa_ops.attention_varlen, q, k, v, ends, ends, is_causal=True)


BOOL = torch.ones(32, 32, dtype=torch.bool).tril()
LENS = torch.tensor([20, 32], dtype=torch.int32)
NEW = torch.randn(1, 3, 1, 64)

# A call, what it calls when it is repeated, and how many functions of the package it may enter.
CALLS = {
    "full": (attention(), 9, [KERNEL]),
    "causal": (attention(is_causal=True), 9, [KERNEL, "equal"]),
    "with lse": (attention(return_lse=True), 9, [KERNEL, "contiguous"]),
    "float mask": (attention(attn_mask=torch.randn(32, 32)), 13, [KERNEL, "equal"]),
    "bool mask": (attention(attn_mask=BOOL), 13, ["where", KERNEL, "equal"]),
    "float mask with lse": (
        attention(attn_mask=torch.randn(32, 32), return_lse=True), 13,
        [KERNEL, "equal", "all", "contiguous"],
    ),
    "lengths": (attention(kv_lens=LENS), 13, ["arange", "view", "where", KERNEL, "equal"]),
    "a single query": (attention(1, 512, heads=(9, 3)), 10, ["view", KERNEL, "reshape"]),
    "cached": (cached(500), 18, ["narrow", "narrow", "view", KERNEL, "reshape"]),
    "appended": (
        cached(400, key=NEW, value=NEW.clone()), 36,
        ["narrow", "copy_"] * 2 + ["narrow", "narrow", "view", KERNEL, "reshape"],
    ),
    "packed": (packed(), 26, ["as_strided"] * 3 + [KERNEL, "equal", "transpose", "flatten"]),
}  # fmt: skip


def operations(call):
    """Those of the call when it is torch_kernel."""
    for _ in range(3):
        call()
    with Operations() as found:
        call()
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_is_the_kernel_and_little_else(name):
    call, limit, expected = CALLS[name]  # a profiler sees no comparisons of tensors
    found = operations(call)
    assert found == expected and found.frames <= limit, (found, found.frames)


def test_large_results_are_copied_by_rows_of_the_batch():
    q, k, v = (torch.randn(4, 8, 128, 64) for _ in range(3))
    for is_causal in (False, True):
        call = partial(fa_ops.attention, q, k, v, is_causal=is_causal)
        assert operations(call).count(KERNEL) == 4
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        torch.testing.assert_close(call(), expected)
        assert call().transpose(1, 2).is_contiguous()


VIEWS = {"as_strided", "transpose", "flatten"}


@pytest.mark.parametrize("name", ["causal", "full", "packed"])
def test_a_repeated_backward_pass_is_the_kernel_and_little_else(name):
    options = {"requires_grad": True}
    call = packed(True) if name == "packed" else attention(is_causal=name == "causal", **options)
    grad = torch.randn_like(call())

    def step():
        out = call()
        with Operations() as found:
            torch.autograd.grad(out, call.args[:3], grad)
        return found

    *_, found = [step() for _ in range(3)]
    checks = [] if name == "full" else ["equal", "equal"]
    kernel = ["norm", f"{KERNEL}_backward", *checks]
    assert [x for x in found if x not in VIEWS] == kernel and len(found) <= 25, found
    assert found.frames <= 45, found.frames


def runs_of(call, monkeypatch):
    """The plan's run of a call, and how often it was left to `dense`."""
    left = []
    real = torch_kernel.prepare

    def prepare(described, otherwise):
        def counted(*args):
            left.append(len(args))
            return otherwise(*args)

        return real(described, counted)

    monkeypatch.setattr(torch_kernel, "prepare", prepare)
    planning.forget()
    return call(), left


DIRTY = ["causal", "bool mask", "lengths", "packed"]


@pytest.mark.parametrize("name", DIRTY)
def test_a_call_with_a_nan_that_rows_do_not_attend_is_left_to_the_other_code(name, monkeypatch):
    call, *_ = CALLS[name]
    q, k, v, *others = (x.clone() if x.is_floating_point() else x for x in call.args)
    clean = call()
    for number in (math.nan, math.inf):
        value = v.clone()
        row = value[19] if name == "packed" else value[0, :, 31]
        row[:] = number  # of the last key, which most rows do not attend
        found, left = runs_of(
            partial(fa_ops.attention_varlen if name == "packed" else fa_ops.attention,
                    q, k, value, *others, **call.keywords), monkeypatch)  # fmt: skip
        assert left, name
        same = torch.isclose(found, clean, atol=1e-6).flatten(-2 if name == "packed" else 1)
        assert same.float().mean() > 0.9, name


def test_a_clean_call_is_not_left_to_the_other_code(monkeypatch):
    for name in DIRTY:
        assert not runs_of(CALLS[name][0], monkeypatch)[1], name
