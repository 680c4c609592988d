"""The error budget: against the fp64 oracle, at most twice the error of the same computation done naively in the input dtype, plus 1e-5."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.testing.inputs import Case
from fa_ops.types import Spec, keywords

FLOOR = 1e-5


def naive(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Attention as one writes it by hand: matmuls in the input dtype, softmax in fp32, weights cast back. Differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    products = (q @ k.transpose(-1, -2)).to(reference.lse_dtype(q.dtype))
    s = reference.modify_scores(products, spec, q.shape[-1])
    p, lse = reference.weights(s, spec.sinks)
    if spec.dropout_p > 0:
        p = p * reference.dropout_factor(p.shape, spec, p.device).to(p.dtype)
    return reference.apply_weights(p.to(q.dtype), v, s > float("-inf")), lse


def assert_within_budget(name: str, actual: Tensor, oracle: Tensor, baseline: Tensor) -> None:
    """Raise AssertionError unless max|actual - oracle| <= 2 max|baseline - oracle| + 1e-5 and NaN and Inf stand in the same places."""
    actual, oracle, baseline = actual.detach().double(), oracle.detach().double(), baseline.detach().double()
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}"
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        differs = kind(actual) != kind(oracle)
        assert not differs.any(), f"{name}: {kind.__name__} differs at {differs.nonzero()[0].tolist()}"
    finite = torch.isfinite(oracle)
    error = ((actual - oracle).abs()[finite]).max().item() if finite.any() else 0.0
    known = ((baseline - oracle).abs()[finite & torch.isfinite(baseline)]).max().item() if finite.any() else 0.0
    budget = 2 * known + FLOOR * max(1.0, oracle[finite].abs().max().item() if finite.any() else 1.0)
    assert error <= budget, f"{name}: error {error:.3e} over the budget {budget:.3e} (naive: {known:.3e})"


def assert_close_to_oracle(case: Case, backend: str, gradients: bool = True) -> None:
    """Run `fa_ops.attention` on the case with the named backend; compare out, lse and every gradient with the oracle."""
    results = {}
    for kind in ("actual", "oracle", "naive"):
        q, k, v, spec = case.fresh(torch.float64 if kind == "oracle" else None, requires_grad=gradients)
        if kind == "actual":
            out, lse = torch.ops.fa.attention_with_lse(q, k, v, *spec[:3], **keywords(spec._replace(backend=backend)))
        else:
            out, lse = (reference.dense if kind == "oracle" else naive)(q, k, v, spec)
        results[kind] = {"out": out, "lse": lse}
        if gradients:
            wanted = {"q": q, "k": k, "v": v}
            if spec.attn_mask is not None and spec.attn_mask.requires_grad:
                wanted["attn_mask"] = spec.attn_mask
            if spec.sinks is not None:
                wanted["sinks"] = spec.sinks
            grad_out, grad_lse = case.grad_outputs(out, lse)
            finite = lse.masked_fill(lse == float("-inf"), 0.0)
            grads = torch.autograd.grad([out, finite], list(wanted.values()), [grad_out, grad_lse])
            results[kind] |= {f"grad_{name}": g for name, g in zip(wanted, grads)}
    for name, value in results["actual"].items():
        assert_within_budget(f"{case}: {name}", value, results["oracle"][name], results["naive"][name])
