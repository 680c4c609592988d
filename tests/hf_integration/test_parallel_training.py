"""The example that trains on a mesh of 2 x 2 gloo processes, against one process."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.evaluation import context_parallel_training, parallel_training

WORLD, STEPS = 4, 3


def check_training() -> None:
    found = parallel_training.compare(2, 2, STEPS)
    assert found["all"] == pytest.approx(found["one process"], rel=1e-5)
    assert found["one process"][-1] < found["one process"][0] - 0.2
    assert found["difference of parameters"] < 2e-5


def check_parameters_are_distributed() -> None:
    mesh = parallel_training.mesh_of(2, 2)
    model = parallel_training.distribute(parallel_training.tiny_llama(), mesh)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight, DTensor) and weight.to_local().numel() * WORLD == weight.numel()


def check_packed_training() -> None:
    """The command for GPUs, on a small model."""
    words = "--tokens 64 --documents 5 --steps 3 --layers 2 --hidden 32 --intermediate 48 --heads 4"
    words += " --kv-heads 2 --vocabulary 64 --processes 4"
    given = context_parallel_training.parser().parse_args(words.split())
    found = context_parallel_training.compare(given, torch.device("cpu"))
    one, (together, seconds) = found["one, all tokens"][0], found["all"]
    assert together == pytest.approx(one, rel=1e-5) and one[-1] < one[0]
    assert seconds > 0 and len(found["one, a share"][0]) == 3


CHECKS = {
    "packed training": check_packed_training,
    "training": check_training,
    "parameters": check_parameters_are_distributed,
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    verdicts.assert_passed(name)
