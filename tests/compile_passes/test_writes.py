"""Writes between the scores and the value product prevent fusion."""

import io

import pytest
import torch
import torch.nn.functional as F

import compile_passes
from tests.compile_passes.helpers import assert_same, fuse, qkv

aten = torch.ops.aten
WRITES = {
    "a list": lambda k: torch._foreach_mul_([k], 2.0),
    "a list of an operator": lambda k: aten._foreach_mul_.Scalar([k], 2.0),
    "operator": lambda k: aten.mul_.Tensor(k, 2.0),
    "operator without an overload": lambda k: aten.mul_(k, 2.0),
    "named": lambda k: torch.relu_(input=k),
    "method of an operator": lambda k: k.__imul__(2.0),
    "item": lambda k: k.__setitem__(0, 1.0),
    "inplace": lambda k: F.relu(k, inplace=True),
    "inplace, all named": lambda k: F.relu(input=k, inplace=True),
    "inplace by position": lambda k: F.relu(k, True),
    "inplace by a later position": lambda k: F.elu(k, 1.0, True),
    "ReLU6": lambda k: torch.nn.ReLU6(inplace=True)(k),
    "renormalised rows": lambda k: F.embedding(torch.tensor([0]), k.view(-1, 8), max_norm=0.1),
    "statistics": lambda k: F.batch_norm(
        k.new_ones(4, 2), k.view(-1)[:2], k.new_ones(2), training=True
    ),
    "through a part": lambda k: k.split(2, -1)[0].add_(1.0),
    "through its diagonal": lambda k: k.diagonal(0, -1, -2).add_(1.0),
    "into out": lambda k: torch.mul(k, 2.0, out=k),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writes_to_the_key_are_refused(write):
    def attend(q, k, v):
        k = k + 0.0
        weights = (q @ k.mT).softmax(-1)
        write(k)
        return weights @ v + k.sum()

    fusion = fuse(attend)
    assert_same(attend, qkv(), fusion, train=False)
    assert fusion.fused == 0 and "written to" in fusion.reasons[0]


class Written(torch.nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, q, k, v):
        k = k.clone()
        weights = (q @ k.mT).softmax(-1)
        self.part(k).zero_()
        return weights @ v + k


PARTS = {
    "slice": lambda k: k[:, :, 3:],
    "row": lambda k: k[0],
    "diagonal": lambda k: k.diagonal(0, -1, -2),
    "view": lambda k: k.view(-1),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_writes_to_parts_in_loaded_programs_are_refused(part):
    """The fake tensors of a loaded program share no memory."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(Written(part), qkv()), file)
    file.seek(0)
    program = torch.export.load(file).module()
    (finding,) = compile_passes.fuse_module(program)
    assert "written to" in finding.reason
    torch.testing.assert_close(program(*qkv()), Written(part)(*qkv()))


def test_writes_to_a_summand_of_a_bias_are_refused():
    """Masks of unknown content are added again for the call."""

    def attend(q, k, v, bias, mask):
        bias = bias * 1.0
        scores = q @ k.mT + (bias + mask)
        bias.mul_(0.0)
        return scores.softmax(-1) @ v + bias.sum()

    fusion = fuse(attend)
    assert_same(attend, (*qkv(), torch.randn(12, 12), torch.randn(12, 12)), fusion)
    assert fusion.fused == 0 and "written to" in fusion.reasons[0]
