"""`compare_launches` notices a launch that differs, and nothing else."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from tests.backends.hopper import compare_launches
from tests.backends.hopper.compare_launches import difference

# The calls run in a process of their own, whose functions the tool replaces.
CODE = """
import pickle, sys
from types import SimpleNamespace
import torch
from fa_ops.testing import Case
from tests.backends.hopper import compare_launches as tool

torch.cuda.get_device_properties = lambda index: SimpleNamespace(multi_processor_count=4)
driver = tool.replace_driver()
case = Case(dtype=torch.bfloat16, D=64, Dv=64, Hq=4, Hkv=2, Sq=70, Sk=90, dropout_p=0.5, sinks=True)
tool._steps(driver, tool.dense_or_packed(case))  # calls after the first are recognised
steps = [tool._steps(driver, tool.dense_or_packed(case)) for _ in range(2)]
sys.stdout.buffer.write(pickle.dumps(steps))
"""


@pytest.fixture(scope="module")
def steps():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True)
    return pickle.loads(found.stdout)


def test_a_call_is_noted_in_the_same_way_wherever_its_tensors_are(steps):
    first, second = steps
    assert difference(first, second) is None
    names = [name for noted, _ in first for name, *_ in noted]
    assert {"dropout row_seeds", "forward forward", "backward backward"} <= set(names)
    words = [word for noted, _ in first for *_, params in noted for one in params for word in one]
    named = {word.partition(" +")[0] for word in words if isinstance(word, str)}
    assert {"query", "key", "value", "sinks", "out", "lse", "grad_out"} <= named
    assert {f"gradient of {name}" for name in ("query", "key", "value")} <= named


def forward_of(step):
    """The index of a step's forward launch."""
    return [name for name, *_ in step].index("forward forward")


@pytest.mark.parametrize("part", ["macro", "grid", "number", "address", "launch"])
def test_a_planted_difference_is_noticed(steps, part):
    wrong = copy.deepcopy(steps[1])
    noted = wrong[0][0]
    at = forward_of(noted)
    name, macros, fields, params = noted[at]
    (words,) = params
    if part == "macro":
        noted[at] = name, macros[:-1], fields, params
    elif part == "grid":
        fields[0] = (fields[0][0] + 1, *fields[0][1:])
    elif part == "number":
        words[words.index(4 << 32 | 2)] += 1  # B and Hq
    elif part == "address":
        i = next(i for i, word in enumerate(words) if isinstance(word, str) and "key" in word)
        words[i] = words[i].replace("+ 0", "+ 2")
    else:
        del noted[at]
    assert difference(steps[0], wrong).startswith("step[0][0]")


def test_sizes_of_parameters_are_read_from_the_sources():
    sizes = compare_launches.parameter_sizes
    assert len(sizes("forward_combine", "forward_combine")) == 10
    assert sizes("decode", "combine") != sizes("mla", "combine")
    assert sizes("backward", "wide_keys") == sizes("backward", "wide_queries")
    assert torch.float16 in compare_launches.DTYPES
