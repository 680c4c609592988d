"""Graphs of common models after the pass."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from expecttest import TestCase

from tests.compile_passes.helpers import fuse, qkv


def code(function, *inputs, dynamic=None) -> str:
    """The body of the rewritten graph, without annotations and clean-up."""
    fusion = fuse(function, dynamic=dynamic)
    fusion.run(*inputs)
    lines = []
    for line in fusion.code.splitlines()[1:]:
        line = re.sub(r";  .*= None", "", line.strip())
        line = re.sub(r"^(\w+) : .* = ", r"\1 = ", line)
        if line:
            lines.append(line)
    return "\n".join(lines) + "\n"


def heads(x):
    return x.view(2, 12, -1, 8).transpose(1, 2)


class TestGraphs(TestCase):
    maxDiff = None

    def setUp(self):
        q, k, v = qkv(Hkv=2)
        self.q, self.k, self.v = (x.transpose(1, 2).reshape(2, 12, -1) for x in (q, k, v))

    def test_llama(self):
        def llama(q, k, v):
            q, k, v = map(heads, (q, k, v))
            k, v = (x[:, :, None].expand(2, 2, 2, 12, 8).reshape(2, 4, 12, 8) for x in (k, v))
            i = torch.arange(12)
            keep = (i[None] <= i[:, None])[None, None]
            mask = torch.where(keep, torch.zeros(()), torch.finfo(q.dtype).min)
            s = torch.matmul(q, k.transpose(2, 3)) * 8**-0.5 + mask
            p = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
            p = F.dropout(p, p=0.0, training=True)
            return torch.matmul(p, v).transpose(1, 2).contiguous().reshape(2, 12, -1)

        self.assertExpectedInline(
            code(llama, self.q, self.k, self.v),
            """\
l_q_ = L_q_
l_k_ = L_k_
l_v_ = L_v_
view = l_q_.view(2, 12, -1, 8)
view_1 = l_k_.view(2, 12, -1, 8)
view_2 = l_v_.view(2, 12, -1, 8)
transpose_5 = view.transpose(1, 2)
transpose_6 = view_1.transpose(1, 2)
transpose_7 = view_2.transpose(1, 2)
attention_default = torch.ops.fa.attention.default(transpose_5, transpose_6, transpose_7, None, 0.0, True, scale = 0.3535533905932738)
transpose_4 = attention_default.transpose(1, 2)
contiguous = transpose_4.contiguous()
reshape_2 = contiguous.reshape(2, 12, -1)
return (reshape_2,)
""",
        )

    def test_a_batch_of_one_stays_the_batch(self):
        """Otherwise its heads would become the batch, and the result would be copied."""

        def llama(q, k, v):
            q, k, v = (x[:1].view(1, 12, -1, 8).transpose(1, 2) for x in (q, k, v))
            k, v = (x[:, :, None].expand(1, 2, 2, 12, 8).reshape(1, 4, 12, 8) for x in (k, v))
            p = F.softmax(torch.matmul(q, k.transpose(2, 3)) * 8**-0.5, dim=-1)
            return torch.matmul(p, v).transpose(1, 2).contiguous().reshape(1, 12, -1)

        self.assertExpectedInline(
            code(llama, self.q, self.k, self.v),
            """\
l_q_ = L_q_
l_k_ = L_k_
l_v_ = L_v_
getitem = l_q_[slice(None, 1, None)]
view = getitem.view(1, 12, -1, 8)
getitem_1 = l_k_[slice(None, 1, None)]
view_1 = getitem_1.view(1, 12, -1, 8)
getitem_2 = l_v_[slice(None, 1, None)]
view_2 = getitem_2.view(1, 12, -1, 8)
transpose_5 = view.transpose(1, 2)
transpose_6 = view_1.transpose(1, 2)
transpose_7 = view_2.transpose(1, 2)
attention_default = torch.ops.fa.attention.default(transpose_5, transpose_6, transpose_7, None, 0.0, False, scale = 0.3535533905932738)
transpose_4 = attention_default.transpose(1, 2)
contiguous = transpose_4.contiguous()
reshape_2 = contiguous.reshape(1, 12, -1)
return (reshape_2,)
""",
        )

    def test_gpt2(self):
        def gpt2(q, k, v, keep):
            q, k, v = map(heads, (q, k, v))
            s = torch.matmul(q, k.transpose(-1, -2))
            s = s / torch.full([], 8**0.5, dtype=s.dtype)
            fill = torch.full([], torch.finfo(s.dtype).min, dtype=s.dtype)
            p = F.softmax(torch.where(keep, s, fill), dim=-1)
            return torch.matmul(F.dropout(p, 0.1), v)

        keep = torch.ones(1, 1, 12, 12, dtype=torch.bool)
        self.assertExpectedInline(
            code(gpt2, self.q, self.q, self.q, keep),
            """\
l_q_ = L_q_
l_keep_ = L_keep_
view = l_q_.view(2, 12, -1, 8)
view_1 = l_q_.view(2, 12, -1, 8)
view_2 = l_q_.view(2, 12, -1, 8)
transpose_4 = view.transpose(1, 2)
transpose_5 = view_1.transpose(1, 2)
transpose_6 = view_2.transpose(1, 2)
any_1 = l_keep_.any(dim = -1, keepdim = True)
logical_not = torch.logical_not(any_1)
or_ = l_keep_ | logical_not
masked_fill = transpose_4.masked_fill(logical_not, 0.0)
empty = torch.empty(0, device = device(type='cpu'))
dropout_seed_default = torch.ops.fa.dropout_seed.default(empty)
attention_default = torch.ops.fa.attention.default(masked_fill, transpose_5, transpose_6, or_, 0.1, False, scale = 0.35355339059327373, dropout_seed = dropout_seed_default)
contiguous = attention_default.contiguous()
return (contiguous,)
""",
        )

    def test_bart(self):
        def bart(q, k, v, mask):
            q, k, v = (heads(x).reshape(8, 12, 8) for x in (q * 8**-0.5, k, v))
            s = torch.bmm(q, k.transpose(1, 2)).view(2, 4, 12, 12) + mask
            p = F.softmax(s.view(8, 12, 12), dim=-1)
            return torch.bmm(p, v).view(2, 4, 12, 8).transpose(1, 2).reshape(2, 12, 32)

        mask = torch.zeros(2, 1, 1, 12)
        self.assertExpectedInline(
            code(bart, self.q, self.q, self.q, mask),
            """\
l_q_ = L_q_
l_mask_ = L_mask_
x = l_q_ * 0.3535533905932738
view = x.view(2, 12, -1, 8)
view_1 = l_q_.view(2, 12, -1, 8)
view_2 = l_q_.view(2, 12, -1, 8)
transpose_5 = view.transpose(1, 2)
transpose_6 = view_1.transpose(1, 2)
transpose_7 = view_2.transpose(1, 2)
attention_default = torch.ops.fa.attention.default(transpose_5, transpose_6, transpose_7, l_mask_, 0.0, False, scale = 1.0)
flatten = attention_default.flatten(0, 1)
view_5 = flatten.view(2, 4, 12, 8)
transpose_4 = view_5.transpose(1, 2)
reshape_3 = transpose_4.reshape(2, 12, 32)
return (reshape_3,)
""",
        )

    def test_image_attention(self):
        def image(q, k, v):
            q, k, v = (x.reshape(2, 32, 12) for x in (q, k, v))
            p = F.softmax(torch.bmm(q.permute(0, 2, 1), k) * 32**-0.5, dim=2)
            return torch.bmm(v, p.permute(0, 2, 1))

        images = [x.mT.contiguous() for x in (self.q, self.q, self.q)]
        self.assertExpectedInline(
            code(image, *images),
            """\
l_q_ = L_q_
l_k_ = L_k_
l_v_ = L_v_
transpose = l_q_.transpose(1, 2)
unsqueeze = transpose.unsqueeze(1)
transpose_1 = l_k_.transpose(1, 2)
unsqueeze_1 = transpose_1.unsqueeze(1)
transpose_2 = l_v_.transpose(1, 2)
unsqueeze_2 = transpose_2.unsqueeze(1)
contiguous = unsqueeze.contiguous()
contiguous_1 = unsqueeze_1.contiguous()
contiguous_2 = unsqueeze_2.contiguous()
attention_default = torch.ops.fa.attention.default(contiguous, contiguous_1, contiguous_2, None, 0.0, False, scale = 0.1767766952966369)
squeeze = attention_default.squeeze(1)
transpose_3 = squeeze.transpose(1, 2)
contiguous_3 = transpose_3.contiguous()
return (contiguous_3,)
""",
        )

    def test_dynamic_length(self):
        def function(q, k, v):
            return F.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v

        self.assertExpectedInline(
            code(function, *qkv(), dynamic=True),
            """\
l_k_ = L_k_
l_q_ = L_q_
l_v_ = L_v_
pow_1 = s43 ** 0.5
attention_default = torch.ops.fa.attention.default(l_q_, l_k_, l_v_, None, 0.0, False)
contiguous = attention_default.contiguous()
return (contiguous,)
""",
        )

    def test_sink(self):
        def function(q, k, v, sinks):
            column = sinks.reshape(1, -1, 1, 1).expand(2, -1, 12, -1)
            s = torch.cat([q @ k.mT, column], -1)
            return s.softmax(-1)[..., :-1] @ v

        self.assertExpectedInline(
            code(function, *qkv(), torch.zeros(4)),
            """\
l_sinks_ = L_sinks_
l_k_ = L_k_
l_q_ = L_q_
l_v_ = L_v_
attention_default = torch.ops.fa.attention.default(l_q_, l_k_, l_v_, None, 0.0, False, scale = 1.0, sinks = l_sinks_)
contiguous = attention_default.contiguous()
return (contiguous,)
""",
        )

    def test_gemma_window_and_softcap(self):
        def gemma(q, k, v):
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            i = torch.arange(12)
            keep = (i[None] <= i[:, None]) & (i[:, None] - i[None] < 5)
            s = torch.tanh(q @ k.mT * 0.25 / 50.0) * 50.0
            return torch.where(keep, s, -2.38e38).softmax(-1) @ v

        self.assertExpectedInline(
            code(gemma, *qkv(Hkv=2)),
            """\
l_k_ = L_k_
l_v_ = L_v_
l_q_ = L_q_
attention_default = torch.ops.fa.attention.default(l_q_, l_k_, l_v_, None, 0.0, True, scale = 0.25, softcap = 50.0, window_left = 4)
contiguous = attention_default.contiguous()
return (contiguous,)
""",
        )

    def test_prefix(self):
        def prefix(q, k, v):
            i = torch.arange(12)
            keep = (i[None] <= i[:, None]) | (i[None] < 7)
            return (q @ k.mT * 0.3).masked_fill(~keep, float("-inf")).softmax(-1) @ v

        self.assertExpectedInline(
            code(prefix, *qkv()),
            """\
l_k_ = L_k_
l_q_ = L_q_
l_v_ = L_v_
arange_1 = torch.arange(12, device = device(type='cpu'))
unsqueeze = arange_1.unsqueeze(0)
unsqueeze_1 = unsqueeze.unsqueeze(1)
add = unsqueeze_1 + 1
full = torch.full((1, 1, 1), 7, dtype = torch.int64, device = device(type='cpu'))
maximum = torch.maximum(add, full)
clamp = maximum.clamp(0, 12)
zeros_like = torch.zeros_like(clamp)
broadcast_tensors = torch.functional.broadcast_tensors(zeros_like, clamp)
stack = torch.stack(broadcast_tensors, -1)
to = stack.to(torch.int32)
attention_default = torch.ops.fa.attention.default(l_q_, l_k_, l_v_, None, 0.0, False, scale = 0.3, key_ranges = to)
contiguous = attention_default.contiguous()
return (contiguous,)
""",
        )

    def test_decode_with_a_static_cache(self):
        def decode(q, k, v, position):
            keep = torch.arange(12) <= position
            return (q @ k.mT * 0.3).masked_fill(~keep, float("-inf")).softmax(-1) @ v

        inputs = (*qkv(Sq=1), torch.tensor(7))
        self.assertExpectedInline(
            code(decode, *inputs),
            """\
l_position_ = L_position_
l_k_ = L_k_
l_q_ = L_q_
l_v_ = L_v_
unsqueeze = l_position_.unsqueeze(0)
unsqueeze_1 = unsqueeze.unsqueeze(1)
unsqueeze_2 = unsqueeze_1.unsqueeze(2)
clamp = unsqueeze_2.clamp(-1152921504606846976, 1152921504606846976)
add = clamp + 1
clamp_1 = add.clamp(0, 12)
reshape = clamp_1.reshape(-1)
size = l_q_.size(0)
expand = reshape.expand(size)
to = expand.to(torch.int32)
attention_default = torch.ops.fa.attention.default(l_q_, l_k_, l_v_, None, 0.0, False, scale = 0.3, kv_lens = to)
contiguous = attention_default.contiguous()
return (contiguous,)
""",
        )

    def test_einsum_of_one_key_head(self):
        def mqa(q, k, v):
            s = torch.einsum("b h i d, b j d -> b h i j", q, k[:, 0])
            return torch.einsum("b h i j, b j d -> b h i d", s.softmax(-1), v[:, 0])

        self.assertExpectedInline(
            code(mqa, *qkv()),
            """\
l_k_ = L_k_
l_q_ = L_q_
l_v_ = L_v_
getitem = l_k_[(slice(None, None, None), 0)]
getitem_1 = l_v_[(slice(None, None, None), 0)]
unsqueeze = getitem.unsqueeze(1)
unsqueeze_1 = getitem_1.unsqueeze(1)
attention_default = torch.ops.fa.attention.default(l_q_, unsqueeze, unsqueeze_1, None, 0.0, False, scale = 1.0)
contiguous = attention_default.contiguous()
return (contiguous,)
""",
        )

    def test_bias_and_temperature(self):
        def biased(q, k, v, bias, temperature):
            return ((q @ k.mT) * temperature + bias).softmax(-1) @ v

        inputs = (*qkv(), torch.randn(4, 12, 12), torch.rand(4, 1, 1))
        self.assertExpectedInline(
            code(biased, *inputs),
            """\
l_k_ = L_k_
l_q_ = L_q_
l_temperature_ = L_temperature_
l_bias_ = L_bias_
l_v_ = L_v_
transpose = l_temperature_.transpose(0, 1)
unsqueeze = transpose.unsqueeze(3)
mul_1 = l_q_ * unsqueeze
unsqueeze_1 = l_bias_.unsqueeze(0)
attention_default = torch.ops.fa.attention.default(mul_1, l_k_, l_v_, unsqueeze_1, 0.0, False, scale = 1.0)
contiguous = attention_default.contiguous()
return (contiguous,)
""",
        )

    def test_dropout(self):
        def dropped(q, k, v):
            p = F.dropout((q @ k.mT / 8**0.5).softmax(-1), 0.1, training=True)
            return p @ v

        self.assertExpectedInline(
            code(dropped, *qkv()),
            """\
l_k_ = L_k_
l_q_ = L_q_
l_v_ = L_v_
empty = torch.empty(0, device = device(type='cpu'))
dropout_seed_default = torch.ops.fa.dropout_seed.default(empty)
attention_default = torch.ops.fa.attention.default(l_q_, l_k_, l_v_, None, 0.1, False, scale = 0.35355339059327373, dropout_seed = dropout_seed_default)
contiguous = attention_default.contiguous()
return (contiguous,)
""",
        )
