"""The benchmark of host time: every row computes what its name states."""

import json

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import fa_ops
from fa_ops.bench import host
from fa_ops.bench.timing import attention_calls
from fa_ops.cli import bench as app

FORWARD = {
    "fa_ops.attention", "fa_ops.attention, lse", "fa_ops.attention, bool mask",
    "fa_ops.attention_varlen", "inside: torch.ops.fa.attention", "inside: planning",
    "inside: backend cpu", "F.sdpa flash", "torch.empty_like",
    "compiled, forward", "compiled F.sdpa, forward",
}  # fmt: skip
BACKWARD = {
    "fa_ops.attention, forward + backward", "inside: torch.ops.fa.attention_backward",
    "inside: backend cpu, backward", "F.sdpa flash, forward + backward",
    "torch.addcmul, forward + backward", "compiled, forward + backward",
    "compiled F.sdpa, forward + backward",
}  # fmt: skip
SHAPE = (1, 2, 16, 8)


def results(words):
    """Results of the runs whose names contain one of the words, and if gradients were enabled."""
    values = {}
    for name, run in host.runs("cpu", SHAPE).items():
        if any(word in name for word in words):
            with run.context():
                values[name.strip()] = run.timed(run.prepare()), torch.is_grad_enabled()
    return values


def test_every_row_has_a_time(tmp_path):
    path = tmp_path / "out.json"
    options = ("--device", "cpu", "--bursts", "20", "--json", str(path))
    result = CliRunner().invoke(app, ["host", *options])
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[0].endswith(": 20 bursts; fa_ops, F.sdpa")
    us = {r["call"]: r["us"] for r in json.loads(path.read_text())["records"]}
    assert us.keys() == FORWARD | BACKWARD and min(us.values()) > 0


def test_forward_rows_compute_attention_without_gradients():
    rows = results(("fa_ops.attention", "fa.attention", "backend cpu", "sdpa", "compiled"))
    forward = {name: row for name, row in rows.items() if name in FORWARD}
    assert len(forward) == 9
    expected, _ = forward.pop("F.sdpa flash")
    for name, (out, recorded) in forward.items():
        out = out[0] if isinstance(out, tuple) else out
        if name == "fa_ops.attention_varlen":
            B, H, S, D = SHAPE
            out = out.view(B, S, H, D).transpose(1, 2)
        torch.testing.assert_close(out, expected, msg=lambda m, name=name: f"{name}: {m}")
        assert not recorded


def test_backward_rows_compute_the_same_three_gradients():
    rows = {name: row for name, row in results(("backward",)).items() if "addcmul" not in name}
    assert rows.keys() == {name for name in BACKWARD if "addcmul" not in name}
    expected, _ = rows["F.sdpa flash, forward + backward"]
    assert len(expected) == 3 and all(grad.abs().max() > 1e-3 for grad in expected)
    for name, (grads, recorded) in rows.items():
        assert recorded == ("forward" in name), name
        for grad, right in zip(grads[:3], expected, strict=True):
            torch.testing.assert_close(grad, right, msg=lambda m, name=name: f"{name}: {m}")


def test_sdpa_rows_enable_only_the_named_kernel(monkeypatch):
    """SDPA is restricted to the kernel in the forward pass and in training."""
    enabled = []

    def spied(*args):
        flags = torch.backends.cuda
        enabled.append((flags.flash_sdp_enabled(), flags.math_sdp_enabled()))
        return original(*args)

    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    monkeypatch.setattr(host, "_compiled", lambda *args: {})  # which cannot have a spy
    results(("sdpa flash",))
    assert len(enabled) == 3 and set(enabled) == {(True, False)}


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_attention_calls_are_counted(backend):
    def step(q):
        out = fa_ops.attention(q, q, q, is_causal=True)
        return fa_ops.attention(out.sin(), q, q)

    q = torch.randn(1, 2, 9, 8)
    if backend is not None:
        step = torch.compile(step, backend=backend)
    step(q)
    assert attention_calls(lambda: step(q)) == 2
    assert attention_calls(lambda: torch.ops.fa.attention(q, q, q)) == 1
    assert attention_calls(q.sin) == 0
