"""torch.export with dynamic lengths, saved and loaded."""

from __future__ import annotations

import io

import pytest
import torch
from torch.export import Dim

import fa_ops


class Dense(torch.nn.Module):
    def forward(self, q, k, v, lens):
        out, lse = fa_ops.attention(q, k, v, is_causal=True, kv_lens=lens, return_lse=True)
        return out.transpose(1, 2).flatten(2), lse


class Packed(torch.nn.Module):
    def forward(self, q, k, v, ends):
        return fa_ops.attention_varlen(q, k, v, ends, ends, window=(4, 0))


def dense_inputs(S: int):
    q, k, v = torch.randn(2, 4, S, 8), torch.randn(2, 2, S, 8), torch.randn(2, 2, S, 8)
    return q, k, v, torch.tensor([S, S - 1], dtype=torch.int32)


def packed_inputs(T: int):
    ends = torch.tensor([0, T // 2, T], dtype=torch.int32)
    return torch.randn(T, 4, 8), torch.randn(T, 2, 8), torch.randn(T, 2, 8), ends


@pytest.mark.parametrize(
    "model, inputs, shapes",
    [
        (Dense(), dense_inputs, ({2: Dim("S")}, {2: Dim("S")}, {2: Dim("S")}, None)),
        (Packed(), packed_inputs, ({0: Dim("T")}, {0: Dim("T")}, {0: Dim("T")}, None)),
    ],
    ids=["dense", "packed"],
)
def test_export_save_load(model, inputs, shapes):
    program = torch.export.export(model, inputs(9), dynamic_shapes=shapes)
    targets = [str(n.target) for n in program.graph.nodes if "fa." in str(n.target)]
    assert len(targets) == 1, targets
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for S in (9, 5, 16):
        given = inputs(S)
        torch.testing.assert_close(loaded(*given), model(*given))
