"""Attention of short rows with a bias in the interpreter, against the oracle."""

import itertools
import random

import pytest
import torch

from fa_ops.backends.triton import configs, launch, plan, short_rows
from fa_ops.call.call import Saved, attention_call
from fa_ops.plans import planning
from fa_ops.testing import (
    Arena,
    Case,
    assert_close_to_oracle,
    assert_right,
    make_case,
    random_calls,
)
from fa_ops.testing.inputs import GRAD_LAYOUTS, LAYOUTS

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NaN, Inf and log2(0) of dead rows
]

FORWARD, BACKWARD = "forward of short rows", "backward of short rows"


def kernels(case: Case) -> tuple[str, str]:
    """The kernels of a case's forward and backward passes."""
    call = case.fresh()
    q = call.query
    saved = Saved(q, None, q, q, case.mask_grad)
    return plan(call).kernel, plan(call._replace(saved=saved)).kernel


def window(r: random.Random, **fields) -> Case:
    """Windows of a batch, of any shape that both passes take."""
    H = r.choice((1, 2))
    shape = r.choice(((0, 1, 1, 1), (0, 1, 1, 1), (1, 1, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1)))
    drawn = {
        "B": r.choice((1, 2, 3)), "Hq": H, "Hkv": H, "Sq": r.choice((1, 7, 16, 33, 49, 64)),
        "Sk": r.choice((1, 9, 16, 31, 49, 64)), "D": r.choice((8, 16, 24, 32, 37, 64)),
        "Dv": r.choice((8, 16, 32, 40)), "mask": "float", "mask_shape": shape,
        "mask_grad": r.random() < 0.7, "mask_holes": r.random() < 0.4,
        "layout": r.choice(LAYOUTS), "grad_layout": r.choice(GRAD_LAYOUTS),
        "scale": r.choice((None, None, 0.0, -0.5, 1.3)), "lse_grad": r.random() < 0.5,
        "deterministic": r.random() < 0.3, "dtype": torch.float16, "seed": r.randrange(2**16),
    }  # fmt: skip
    return make_case(**(drawn | fields))


@pytest.mark.parametrize("seed", range(12))
def test_windows(seed):
    case = window(random.Random(seed))
    assert kernels(case) == (FORWARD, BACKWARD)
    assert_right(case, "triton", Arena() if seed % 2 else None, repeated=seed == 0)


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_only_the_forward_pass_holds(seed):
    r = random.Random(seed)
    Hkv = r.choice((1, 2))
    case = window(
        r, Hq=Hkv * r.choice((1, 2)), Hkv=Hkv, B=r.choice((1, 2)), mask_holes=False,
        Sq=r.choice((65, 100, 128)), Sk=r.choice((3, 65, 100, 128)),
        mask_shape=r.choice(((0, 1, 1, 1), (1, 0, 1, 1))),
    )  # fmt: skip
    assert kernels(case) == (FORWARD, "backward")
    assert_close_to_oracle(case, "triton", gradients=seed == 0)


@pytest.mark.parametrize("operand", ["query", "key", "value", "grad_out", "attn_mask"])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite(number, operand):
    """They reach only what attends them, whose windows are recomputed."""
    case = window(
        random.Random(number + operand), B=2, Sq=20, Sk=30, D=16, Dv=16, mask_holes=True,
        poison=f"{number} {operand}", layout="bhsd",
    )  # fmt: skip
    assert_right(case, "triton", None, repeated=False)


@pytest.mark.parametrize("low", [float("-inf"), torch.finfo(torch.float32).min, -1e9])
def test_rows_that_a_bias_hides(low):
    """All keys of some rows: of -inf none is attended, of a finite number all alike."""
    case = window(random.Random(1), B=4, Hq=2, Hkv=2, Sq=20, Sk=30, D=16, Dv=16, scale=None)
    q, k, v = case.fresh()[:3]
    bias = torch.randn(1, 2, 20, 30)
    bias[:, :, 3:6] = low
    bias[:, 1, 8, 5:] = low
    out, lse = short_rows.forward(attention_call(q, k, v, attn_mask=bias))
    hidden = torch.full((3,), low == float("-inf"))
    assert torch.equal(lse[0, 0, 3:6] == float("-inf"), hidden)
    expected = torch.zeros(2, 16) if hidden[0] else v[1].float().mean(1)
    torch.testing.assert_close(out[1, :, 4].float(), expected, atol=1e-3, rtol=1e-3)
    if low > float("-inf"):
        return
    grads = short_rows.backward(
        attention_call(
            q, k, v, attn_mask=bias, saved=Saved(torch.ones_like(out), None, out, lse, True)
        )
    )
    assert not grads.query[:, :, 3:6].any() and not grads.attn_mask[:, :, 3:6].any()
    assert all(bool(x.isfinite().all()) for x in grads[:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shared", [True, False])
def test_the_gradient_of_a_bias_repeats_and_has_its_dtype(dtype, shared):
    """Also of a bias of another dtype than the queries', whose rows are not contiguous."""
    case = window(random.Random(2), B=9, Hq=2, Hkv=2, Sq=20, Sk=30, D=16, Dv=16, scale=None)
    q, k, v = case.fresh()[:3]
    bias = torch.randn(1 if shared else 9, 2, 30, 20).to(dtype).mT
    out, lse = short_rows.forward(attention_call(q, k, v, attn_mask=bias))
    saved = Saved(torch.randn_like(out), torch.randn_like(lse), out, lse, True)
    first, second = (
        short_rows.backward(attention_call(q, k, v, attn_mask=bias, saved=saved)) for _ in "ab"
    )
    assert all(torch.equal(a, b) for a, b in zip(first[:4], second[:4]))
    assert (first.attn_mask.dtype, first.attn_mask.shape) == (dtype, bias.shape)


@pytest.mark.parametrize("programs", [1, 3, 64])
def test_the_batch_is_divided_among_programs(programs, monkeypatch):
    """Programs with several windows, with one each, and with one more than others."""
    monkeypatch.setattr(short_rows, "multiprocessors", lambda device: programs)
    assert_close_to_oracle(window(random.Random(3), B=10, mask_grad=True), "triton")


OTHERS = [
    {"is_causal": True},
    {"window": (3, 4)},
    {"softcap": 2.0},
    {"alibi": "heads"},
    {"sinks": True},
    {"kv_lens": True},
    {"key_ranges": (1, 1, 1)},
    {"dropout_p": 0.1},
    {"mask_blocks": True},
    {"scale": 1e31},
    {"mask": None},
    {"mask": "bool", "mask_grad": False},
    {"dtype": torch.float32},
    {"D": 65},
    {"Dv": 72},
    {"Sq": 129},
    {"Sk": 129},
]


@pytest.mark.parametrize("fields", OTHERS, ids=str)
def test_other_calls_run_the_kernels_for_all(fields):
    case = window(random.Random(0), scale=None)
    assert kernels(case) == (FORWARD, BACKWARD)
    assert kernels(make_case(**(case.__dict__ | fields))) == ("forward", "backward")


def test_the_gradient_of_a_bias_that_part_of_the_batch_shares_is_computed_by_the_kernel_for_it():
    for shape in itertools.product((0, 1), repeat=4):
        case = window(random.Random(0), B=3, Hq=2, Hkv=2, Sq=9, Sk=9, mask_shape=shape)
        partial = shape[0] == 1 and shape != (1, 1, 1, 1)
        for mask_grad in (False, True):
            chosen = kernels(make_case(**(case.__dict__ | {"mask_grad": mask_grad})))
            assert chosen == (FORWARD, "backward" if partial and mask_grad else BACKWARD)


def test_gpus_with_fewer_registers_for_it_hold_fewer_scores(monkeypatch):
    monkeypatch.setattr(configs, "INTERPRETED", False)
    case = window(random.Random(0), Sq=49, Sk=49, D=32, Dv=32)
    assert kernels(case) == (FORWARD, BACKWARD)
    assert kernels(make_case(**(case.__dict__ | {"D": 64}))) == (FORWARD, "backward")
    assert kernels(make_case(**(case.__dict__ | {"Sk": 65}))) == ("forward", "backward")


def test_random_calls_reach_them():
    """Those of `fa_ops.testing.random_calls`, in each pass, at edges and elsewhere."""
    for edges in (True, False):
        reached = set()
        for seed in range(300):
            pick = random.Random(seed).choice
            family = random_calls.family(pick, "dense", (torch.float16,), edges)
            if family.sizes == "windows":
                reached.update(kernels(family.case(pick)))
        assert reached == {FORWARD, BACKWARD, "backward"}


def test_a_bias_that_was_expanded_is_loaded_once_and_has_a_gradient_for_each_window():
    case = window(random.Random(5), B=3, Hq=2, Hkv=2, Sq=9, Sk=9)
    q, k, v = case.fresh(requires_grad=True)[:3]
    bias = torch.randn(1, 2, 9, 9).expand(3, 2, 9, 9).requires_grad_()
    planning.forget()
    out = torch.ops.fa.attention(q, k, v, bias, backend="triton")
    (grad,) = torch.autograd.grad(out.float().square().sum(), [bias])
    expected = torch.ops.fa.attention(q, k, v, bias, backend="reference")
    (right,) = torch.autograd.grad(expected.float().square().sum(), [bias])
    torch.testing.assert_close(grad, right, atol=2e-2, rtol=2e-2)
