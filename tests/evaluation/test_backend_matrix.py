"""The page on backends and features shows what the backends say."""

import re
from unittest import mock

from fa_ops.backends import cpu
from tests.evaluation import backend_matrix
from tests.evaluation.backend_matrix import FEATURES, PAGE, cell, table


def feature(name: str) -> backend_matrix.Feature:
    return next(f for f in FEATURES if f.name == name)


def test_the_page_is_what_the_command_prints():
    refresh = "run `python -m tests.evaluation.backend_matrix --write`"
    assert table() in PAGE.read_text(), refresh


def test_refusals_reach_the_table():
    softcap = feature("`softcap`")
    assert cell(softcap, "cpu") == "yes"
    no_gradient = lambda call: None if call.saved is None else "has no gradient"  # noqa: E731
    with mock.patch.object(cpu, "supports", no_gradient):
        assert cell(softcap, "cpu") == "forward"
    no_softcap = lambda call: "has no softcap" if call.options.softcap else None  # noqa: E731
    with mock.patch.object(cpu, "supports", no_softcap):
        assert cell(softcap, "cpu") == "–" and cell(feature("`sinks`"), "cpu") == "yes"


def test_the_backend_that_a_refusal_names_supports_the_call():
    wrong = []
    for row in FEATURES:
        with backend_matrix.pretended_gpu((9, 0)):
            forward, backward = backend_matrix.refusals(row, "hopper")
            reason = forward or backward or ""
            named = re.search(r"the (\w+) backend (can run|runs|takes)", reason)
            if named and any(backend_matrix.refusals(row, named[1])):
                wrong.append(f"{row.name}: {reason}")
    assert not wrong


def test_a_refusal_on_older_gpus_names_the_oldest_that_suffices():
    assert cell(feature("e4m3 cache"), "triton") == "yes, from 8.9"
    assert cell(feature("bfloat16"), "triton") == "yes"
