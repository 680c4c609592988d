"""Backend selection: by name, context manager and environment variable, with reasons."""

from __future__ import annotations

import os
import subprocess
import sys

import expecttest
import pytest
import torch

import fa_ops
from fa_ops import dispatch
from fa_ops.types import Cache, Spec, rows_are_aligned


def qkv(**options):
    return [torch.randn(1, 2, 4, 8, **options) for _ in range(3)]


def test_auto_selects_the_cpu_backend_for_cpu_tensors():
    assert dispatch.select(*qkv(), Spec()) is dispatch.load("cpu")
    assert "triton" not in dispatch.AUTO["cpu"]
    assert all("reference" not in names for names in dispatch.AUTO.values())


def test_a_named_backend_never_falls_back(monkeypatch):
    monkeypatch.setattr(dispatch, "_selected", {})
    monkeypatch.setattr(dispatch.load("cpu"), "support_error", lambda *args: "not today")
    with pytest.raises(NotImplementedError, match="backend 'cpu' cannot run this call: not today"):
        fa_ops.attention(*qkv(), backend="cpu")


def test_auto_reports_the_reason_of_every_backend(monkeypatch):
    monkeypatch.setattr(dispatch, "_selected", {})
    monkeypatch.setattr(dispatch.load("cpu"), "support_error", lambda *args: "not today")
    with pytest.raises(NotImplementedError, match="on cpu:\n  cpu: not today"):
        fa_ops.attention(*qkv())


def test_a_backend_may_refuse_a_call_by_its_number_of_keys(monkeypatch):
    """A remembered choice is not used for a call with many more keys."""
    monkeypatch.setattr(dispatch, "_selected", {})

    def refuse(q, k, *call):
        return "too long" if k.shape[-2 if k.dim() == 4 else 0] > 2**29 else None

    monkeypatch.setattr(dispatch.load("cpu"), "support_error", refuse)
    monkeypatch.setattr(dispatch.load("cpu"), "cache_error", refuse)
    q, k, _ = qkv()
    far = torch.zeros(1, 2, 1, 8).expand(-1, -1, 2**29 + 1, -1)
    tokens = torch.zeros(1, 2, 8).expand(2**29 + 1, -1, -1)
    for short, long, select in (
        (k, far, lambda k: dispatch.select(q, k, k, Spec())),
        (k[0], tokens, lambda k: dispatch.select(q[0], k, k, Spec())),
        (k, far, lambda k: dispatch.select_cache(q, k, k, Cache(), Spec())),
    ):
        assert select(short) is dispatch.load("cpu")
        with pytest.raises(NotImplementedError, match="too long"):
            select(long)


def test_use_backend_can_be_nested(monkeypatch):
    assert dispatch.default is None
    with fa_ops.use_backend("reference"):
        assert dispatch.select(*qkv(), Spec()) is dispatch.load("reference")
        with pytest.raises(RuntimeError), fa_ops.use_backend("auto"):
            assert dispatch.select(*qkv(), Spec()) is dispatch.load("cpu")
            raise RuntimeError
        assert dispatch.default == "reference"
        assert dispatch.select(*qkv(), Spec(backend="cpu")) is dispatch.load("cpu")
    assert dispatch.default is None


def test_use_backend_applies_to_the_backward_of_its_calls(monkeypatch):
    """The function passes the name to the operator, whose backward may run outside the block."""
    q, k, v = qkv(requires_grad=True)
    with fa_ops.use_backend("reference"):
        out = fa_ops.attention(q, k, v)
    names = []
    select = dispatch.select

    def spy(q, k, v, spec, backward=False):
        names.append(spec.backend)
        return select(q, k, v, spec, backward)

    monkeypatch.setattr(dispatch, "select", spy)
    out.sum().backward()
    assert names == ["reference"]


def test_remembered_choices_depend_on_features_and_dtypes(monkeypatch):
    monkeypatch.setattr(dispatch, "_selected", {})
    checked = []
    cpu = dispatch.load("cpu")
    monkeypatch.setattr(cpu, "support_error", lambda q, k, v, spec: checked.append((q.dtype, spec)))
    specs = [
        Spec(),
        Spec(is_causal=True),
        Spec(attn_mask=torch.ones(4, 4)),
        Spec(attn_mask=torch.ones(4, 4, dtype=torch.bool)),
        Spec(dropout_p=0.1),
        Spec(window_left=1),
        Spec(window_right=1),
        Spec(softcap=1.0),
        Spec(alibi_slopes=torch.ones(2)),
        Spec(sinks=torch.ones(2)),
        Spec(kv_lens=torch.ones(1, dtype=torch.int32)),
        Spec(key_ranges=torch.ones(1, 1, 1, 2, dtype=torch.int32)),
        Spec(deterministic=True),
    ]
    for _ in range(2):
        for spec in specs:
            dispatch.select(*qkv(), spec)
    assert len(checked) == len(specs)
    dispatch.select(*qkv(dtype=torch.float64), Spec())
    dispatch.select(*[x[0] for x in qkv()], Spec())
    assert len(checked) == len(specs) + 2


def test_few_queries_are_decoding_if_all_of_a_row_have_one_key_range():
    q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 600, 8)
    for shape, decodes in (((2, 1, 1), True), ((1, 1, 1), True), ((1, 4, 1), False),
                           ((2, 1, 3), False)):  # fmt: skip
        ranges = torch.zeros(*shape, 2, dtype=torch.int32)
        assert dispatch._decodes(q, k, Spec(key_ranges=ranges)) == decodes
    assert not dispatch._decodes(q, k[:, :, :100], Spec())


def test_backends_lists_every_backend_with_its_reason():
    listed = dict(dispatch.backends())
    assert tuple(listed) == dispatch.BACKENDS
    assert listed["cpu"] is None and listed["reference"] is None
    if not torch.cuda.is_available():
        assert isinstance(listed["triton"], str)


def test_a_backend_that_cannot_be_imported_is_unavailable(monkeypatch):
    monkeypatch.setattr(dispatch, "_available", {})
    monkeypatch.setitem(sys.modules, "fa_ops.backends.triton", None)
    assert "cannot be imported" in dispatch.available_error("triton")


class TestExplain(expecttest.TestCase):
    def test_explain(self):
        gpu = "needs a CUDA device, got cpu"
        refusals = {"hopper": gpu, "triton": gpu, "cpu": None, "reference": None}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "refusal", lambda name, *args: refusals[name])
            self.assertExpectedInline(
                str(dispatch.explain(*qkv(), is_causal=True)),
                """\
backend: cpu
  hopper: needs a CUDA device, got cpu
  triton: needs a CUDA device, got cpu
  cpu: can run this
  reference: can run this""",
            )
            self.assertExpectedInline(
                str(dispatch.explain(*qkv(), backend="triton")),
                """\
backend: none
  hopper: needs a CUDA device, got cpu
  triton: needs a CUDA device, got cpu
  cpu: can run this
  reference: can run this""",
            )


def test_unknown_names_are_refused():
    names = ", ".join(map(repr, dispatch.BACKENDS))
    with pytest.raises(ValueError) as error:
        fa_ops.use_backend("cuda")
    assert str(error.value) == f"backend must be 'auto' or one of {names}, got 'cuda'"


def run(code: str, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )


CALL = """
import torch, fa_ops
from fa_ops import dispatch
q = torch.randn(1, 1, 2, 4)
print(dispatch.default)
fa_ops.attention(q, q, q)
"""


def test_the_environment_variable_sets_the_default():
    result = run(CALL, FA_OPS_BACKEND="reference")
    assert result.returncode == 0 and result.stdout == "reference\n", result.stderr


def test_an_unknown_name_in_the_environment_variable_is_refused():
    result = run(CALL, FA_OPS_BACKEND="fast")
    assert "ValueError: backend must be 'auto' or one of" in result.stderr
    assert "got 'fast'" in result.stderr


def test_rows_are_aligned_if_their_strides_are_multiples_of_16_bytes():
    q = torch.randn(4, 8, 16, 128)
    single = q[:1, :1, :1].as_strided((1, 1, 1, 128), (3, 5, 7, 1))  # strides of sizes of 1
    assert rows_are_aligned(q) and rows_are_aligned(q.transpose(1, 2), single)
    odd = torch.randn(4, 8, 16, 130)[..., :128]
    for other in (odd, q.mT, q[..., 1:], q[:, :1].expand(4, 8, 16, 128), odd.half()[..., 2:]):
        assert not rows_are_aligned(q, other)
