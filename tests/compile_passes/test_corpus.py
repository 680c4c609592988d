"""Every spelling in spellings/ is fused if it is attention, and keeps its numbers."""

from __future__ import annotations

import pytest

from tests.compile_passes.helpers import fuse
from tests.compile_passes.spellings import CASES
from tests.evaluation import fusion_corpus as corpus


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_spellings_fuse_as_expected(name, train):
    case = CASES[name]
    outcome = corpus.run(case, train and "infer" not in case.tags, False, peer=False, whole=False)
    assert not outcome.wrong, outcome.wrong
    wanted = case.cores if case.expected == "fuse" else 0
    assert outcome.fused == wanted


@pytest.mark.parametrize(
    "name",
    """gpt2_buffer_and_where neox_baddbmm opt_maximum gemma_google_window gpt_oss_reference
    prefix_or_chunk decode_with_position windows_with_mask learned_bias_beside_mask
    grouped_by_view masked_after_the_maximum""".split(),
)
def test_spellings_fuse_with_dynamic_shapes(name):
    case = CASES[name]
    outcome = corpus.run(case, "infer" not in case.tags, True, peer=False, whole=False)
    assert not outcome.wrong and outcome.fused == case.cores, outcome


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "name", ["slice_of_a_triangle", "last_rows_of_a_triangle", "narrowed_triangle"]
)
def test_slices_of_a_triangle_are_causal_for_sizes_of_any_kind(name, dynamic):
    case = CASES[name]
    fusion = fuse(case.fn, dynamic=dynamic)
    fusion.run(*case.make_inputs())
    assert [finding.masks for finding in fusion.findings] == ["is_causal"]
