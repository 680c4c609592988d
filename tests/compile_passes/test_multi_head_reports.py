"""Reports and graphs of `nn.MultiheadAttention`, fused and not."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn

import compile_passes
from compile_passes.report import Refusal
from tests.compile_passes.helpers import fuse
from tests.compile_passes.test_graphs import code
from tests.compile_passes.test_multi_head import B, E, H, L, randn, random_module

ATTENTION = torch.ops.fa.attention.default


class Returned(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = random_module()

    def forward(self, x):
        return self.attention(x, x, x)


class Read(Returned):
    def forward(self, x):
        out, weights = self.attention(x, x, x)
        return out * weights.mean()


class Mapped(Returned):
    def forward(self, x):
        return torch.vmap(lambda x: self.attention(x, x, x)[0])(x)


class OneIsFused(Returned):
    def forward(self, x):
        out, weights = self.attention(x, x, x)
        return self.attention(out, out, out)[0], weights


class TestReport(TestCase):
    maxDiff = None

    def reasons(self, module, *inputs):
        report = compile_passes.explain(module, *inputs)
        return [f.reason for f in report.findings]

    def test_reasons(self):
        x = randn(L, B, E)
        cases = [(cls.__name__, cls(), x) for cls in (Returned, Read, OneIsFused)]
        cases.append(("Mapped", Mapped(), randn(3, L, B, E)))
        meta = nn.MultiheadAttention(E, H, device="meta")
        cases.append(("meta", lambda x: meta(x, x, x)[0], x.to("meta", torch.float32)))
        lines = [f"{name}: {self.reasons(*case)}" for name, *case in cases]
        layer = random_module(nn.TransformerEncoderLayer, E, H, 16, batch_first=True).eval()
        with torch.no_grad():
            lines.append(f"fast path: {self.reasons(layer, randn(B, L, E))}")
        self.assertExpectedInline(
            "\n".join(lines),
            """\
Returned: ['the attention weights are returned; fused attention never computes them']
Read: ['the attention weights are also read by mean; fused attention never computes them']
OneIsFused: ['the attention weights are returned; fused attention never computes them', '']
Mapped: ['_add_batch_dim is not a plain tensor: Tensor']
meta: ['query is on meta']
fast path: ['torch._transformer_encoder_layer_fwd is one operator; torch.backends.mha.set_fastpath_enabled(False) selects the code that can be fused']""",
        )

    def test_fused_graph(self):
        module = random_module(batch_first=True)
        x = randn(B, L, E)

        def attend(x):
            causal = torch.ones(L, L, dtype=torch.bool).triu(1)
            return module(x, x, x, attn_mask=causal)[0]

        # the rest is torch's own, and differs in torch 2.11
        self.assertExpectedInline(
            code(attend, x).partition("\nflatten = ")[0] + "\n",
            """\
l_x_ = L_x_
l_module_parameters_in_proj_bias_ = L_module_parameters_in_proj_bias_
l_module_parameters_in_proj_weight_ = L_module_parameters_in_proj_weight_
l_module_modules_out_proj_parameters_weight_ = L_module_modules_out_proj_parameters_weight_
l_module_modules_out_proj_parameters_bias_ = L_module_modules_out_proj_parameters_bias_
ones = torch.ones(6, 6, dtype = torch.bool)
causal = ones.triu(1)
zeros_like = torch.zeros_like(causal, dtype = torch.float64)
mask = zeros_like.masked_fill_(causal, -inf)
query = l_x_.transpose(1, 0)
linear = torch.ops.aten.linear.default(query, l_module_parameters_in_proj_weight_, l_module_parameters_in_proj_bias_)
unflatten = torch.ops.aten.unflatten.int(linear, -1, [3, 32])
unsqueeze = torch.ops.aten.unsqueeze.default(unflatten, 0)
transpose_2 = torch.ops.aten.transpose.int(unsqueeze, 0, -2)
squeeze = torch.ops.aten.squeeze.dim(transpose_2, -2)
contiguous = torch.ops.aten.contiguous.default(squeeze)
select = torch.ops.aten.select.int(contiguous, 0, 0)
select_1 = torch.ops.aten.select.int(contiguous, 0, 1)
select_2 = torch.ops.aten.select.int(contiguous, 0, 2)
view = torch.ops.aten.view.default(select, [6, 8, 8])
transpose_3 = torch.ops.aten.transpose.int(view, 0, 1)
view_1 = torch.ops.aten.view.default(select_1, [6, 8, 8])
view_2 = torch.ops.aten.view.default(select_2, [6, 8, 8])
mul = torch.ops.aten.mul.Tensor(transpose_3, 0.3535533905932738)
unflatten_1 = mul.unflatten(0, (2, 4))
unflatten_2 = view_1.unflatten(1, (2, 4))
permute = unflatten_2.permute(1, 2, 0, 3)
unflatten_3 = view_2.unflatten(1, (2, 4))
permute_1 = unflatten_3.permute(1, 2, 0, 3)
attention_default = torch.ops.fa.attention.default(unflatten_1, permute, permute_1, None, 0.0, True, scale = 1.0)
""",
        )


def test_reports_name_the_line_that_calls_the_module():
    findings = compile_passes.explain(OneIsFused(), randn(L, B, E)).findings
    assert [(f.fused, f.location.file, f.location.code) for f in findings] == [
        (False, __file__, "out, weights = self.attention(x, x, x)"),
        (True, __file__, "return self.attention(out, out, out)[0], weights"),
    ]


def test_calls_that_are_not_fused_are_kept():
    for module, calls in ((Returned(), 1), (Read(), 1), (OneIsFused(), 1)):
        fusion = fuse(module)
        x = randn(L, B, E)
        torch.testing.assert_close(fusion.run(x), module(x))
        targets = [node.target for node in fusion.graphs[-1].nodes]
        assert targets.count(F.multi_head_attention_forward) == calls
        assert targets.count(ATTENTION) == fusion.fused == isinstance(module, OneIsFused)


def test_refused_cores_leave_their_call(monkeypatch):
    """A call without weights, which would become SDPA, included."""

    def refuse(*args):
        raise Refusal("planted")

    monkeypatch.setattr(sys.modules["compile_passes.fuse"], "attention_site", refuse)
    module = random_module()
    fusion = fuse(lambda x: module(x, x, x, need_weights=False)[0])
    fusion.run(randn(L, B, E))
    assert fusion.reasons == ["planted"]
    names = [n.name for n in fusion.graphs[-1].nodes if n.op == "call_function"]
    assert names == ["multi_head_attention_forward", "attn_output"]
