"""Rewrites before matching: what they make stays where it is fused, and is restored elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_passes.rewrites import REWRITES
from tests.compile_passes.cases import Case, bhsd
from tests.compile_passes.helpers import check, fuse, results, verified
from tests.compile_passes.spellings import CASES


@pytest.mark.parametrize(
    "name",
    """differential joined_keys_with_masks tied_rows convit written_by_a_bool_mask
    written_bias""".split(),
)
def test_dynamic_shapes(name):
    case = CASES[name]
    check(case.fn, case.make_inputs(), case.cores, dynamic=True)


def test_joined_keys_are_verified():
    for name in ("differential", "joined_keys", "two_attentions_are_normalised"):
        case = CASES[name]
        findings = verified(case.fn, case.make_inputs())
        assert len(findings) == 2 and all(f.fused for f in findings)


@pytest.mark.parametrize("name", ["weights_over_the_queries_are_added", "joined_rows_of_tables"])
def test_a_form_that_is_not_fused_is_restored(name):
    function, inputs = CASES[name].fn, CASES[name].make_inputs()
    fusion = fuse(function)
    actual, expected = fusion.run(*inputs), function(*inputs)
    assert torch.equal(actual, expected)
    names = [node.target for node in fusion.graphs[-1].nodes]
    products = 1 if "queries" in name else 2
    assert names.count("softmax") == 3 - products
    assert [getattr(x, "__name__", x) for x in names].count("matmul") == (3 if products == 1 else 2)


RESTORED = (
    "a_view_sees_the_write written_and_returned normalised_and_returned normalised_after_dropout"
)


@pytest.mark.parametrize("name", [*RESTORED.split(), "sum_of_three"])
def test_the_nodes_of_the_model_are_restored(name):
    def sum_of_three(q, k, v):
        a, b, c = ((x @ k.mT).softmax(-2) for x in (q, k, v))
        w = a + b * 0.5 - c
        return (w / w.sum(-1, keepdim=True)) @ v

    case = CASES.get(name) or Case(sum_of_three, bhsd(), "no_fuse")
    inputs = case.make_inputs()
    captured = []

    def backend(gm, _):
        captured.extend(node.target for node in gm.graph.nodes if node.op.startswith("call"))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(case.fn, backend=backend)(*inputs)
    fusion = fuse(case.fn)
    fusion.run(*inputs)
    left = [node.target for node in fusion.graphs[-1].nodes if node.op.startswith("call")]
    assert not fusion.fused and left == captured


def test_an_input_that_was_replaced_keeps_the_new_form():
    """The first attention replaces its result, an operand of the sum that is not fused."""

    def function(q, k, v, k2):
        first = (q @ k.mT).softmax(-1) @ v
        a, b = (first @ k.mT).softmax(-2), (first @ k2.mT).softmax(-2)
        return (a + b) @ first

    inputs = (*(torch.randn(2, 4, 12, 8) for _ in range(4)),)
    fusion = fuse(function)
    for actual, expected in zip(results(fusion.run, inputs, True), results(function, inputs, True)):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert fusion.fused == 1


def test_a_write_is_not_restored_before_a_fused_call_that_reads_the_tensor():
    """The call stands where the product with the value was, after the write."""

    def function(q, k, v, table):
        bias = table * 1.0
        weights = (q @ k.mT + bias).softmax(-1)
        bias.view(-1).mul_(3.0)
        return weights @ v, bias

    q, k, v = (torch.randn(2, 4, 12, 8) for _ in range(3))
    fusion = check(function, (q, k, v, torch.randn(12, 12)))
    assert "mul_" not in fusion.code.replace("mul_1", "")


def test_the_page_on_fusion_lists_the_rewrites():
    page = Path(__file__).parents[2] / "docs/fusion.md"
    rows = "\n".join(f"| {rewrite.name} | {rewrite.reason} |" for rewrite in REWRITES)
    assert f"|---|---|\n{rows}\n\n" in page.read_text()
