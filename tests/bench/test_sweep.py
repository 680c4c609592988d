"""Benchmarks detect wrong, missing and failing implementations before they print a time."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
import typer

from fa_ops.bench import peers, sweep
from fa_ops.bench.peers import Implementation
from fa_ops.bench.problems import BIASED, PRESETS


def right(problem, device):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)


def ignores_causal(problem, device):
    return F.scaled_dot_product_attention


def wrong_gradient(problem, device):
    return lambda q, k, v: right(problem, device)(q, k.detach(), v) + 0 * k.sum()


def missing(problem, device):
    raise ImportError("No module named 'flash_attn'")


def sweep_causal(build, backward, ours=False):
    problems = [p for p in PRESETS["tiny"]() if p.causal]
    context = contextlib.nullcontext() if backward else torch.no_grad()
    implementations = [Implementation("it", build, ours=ours), Implementation("peer", right)]
    with context:
        return list(sweep.sweep(problems, implementations, "cpu", backward, budget_ms=1.0))


@pytest.mark.parametrize("backward", [False, True])
def test_correct_implementations_are_timed(backward):
    ((_, (it, _)),) = sweep_causal(right, backward)
    assert it.reason is None
    assert 0 < it.time.low <= it.time.ms <= it.time.high


@pytest.mark.parametrize(
    ("build", "backward", "reason"),
    [
        (ignores_causal, False, "WRONG: out"),
        (ignores_causal, True, "WRONG: out"),
        (wrong_gradient, True, "WRONG: dk"),
        (missing, False, "ImportError: No module named 'flash_attn'"),
    ],
)
def test_other_implementations_are_skipped_with_the_reason(build, backward, reason):
    rows = sweep_causal(build, backward)
    ((problem, (it, peer)),) = rows
    assert it.time is None and it.reason.startswith(reason)
    assert peer.time is not None
    assert sweep.refusals(rows) == {f"it: {it.reason}": [str(problem)]}
    assert sweep.sweep_records(rows, backward)[0]["not_timed"] == it.reason


def test_ratio_is_the_time_of_the_peer_divided_by_ours():
    rows = sweep_causal(right, backward=False, ours=True)
    ((_, (it, peer)),) = rows
    assert sweep.ratios(rows[0][1]) == {"best peer": peer.time.ms / it.time.ms}


def test_only_selects_implementations_by_words():
    assert {i.name for i in peers.choose("cpu", "flash")} == {"sdpa flash"}
    assert [i.name for i in peers.choose("cpu")] == ["fa_ops cpu", "sdpa flash", "sdpa math"]
    with pytest.raises(
        typer.BadParameter, match="no implementation is called 'flsh'; there are: .*flex"
    ):
        peers.choose("cpu", "flsh")


def test_cuda_runs_name_every_peer():
    names = {i.name for i in peers.implementations("cuda")}
    assert {"sdpa cudnn", "sdpa flash", "sdpa math", "flex"} <= names
    assert {f"flash-attn {n}" for n in (2, 3, 4)} <= names


@pytest.mark.parametrize("backward", [False, True])
def test_windows_have_a_bias_whose_gradient_is_timed_too(backward):
    """An implementation that ignores the bias is wrong, one that takes none is not measured."""
    taken = []

    def ours(problem, device):
        def call(q, k, v, bias):
            taken.append(bias.requires_grad)
            return F.scaled_dot_product_attention(q, k, v, bias)

        return call

    def ignores_bias(problem, device):
        return lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v) + 0 * bias.sum()

    (problem,) = BIASED["tiny-windows"]()
    assert str(problem) == "D16 full S9 B3 H2 biases 1"
    builds = {"it": ours, "wrong": ignores_bias}
    known = [Implementation(name, build, takes_bias=True) for name, build in builds.items()]
    with torch.set_grad_enabled(backward):
        rows = list(
            sweep.sweep([problem], [*known, Implementation("no", right)], "cpu", backward, 1.0)
        )
    ((_, (it, wrong, no)),) = rows
    assert it.time is not None and it.reason is None and set(taken) == {backward}
    assert wrong.reason.startswith("WRONG: out") and no.reason == "measured without a bias only"
    assert sweep.sweep_records(rows, backward)[0]["biases"] == 1
