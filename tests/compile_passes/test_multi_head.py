"""`nn.MultiheadAttention`, one call in Dynamo's graphs, and the layers that contain it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import compile_passes
from tests.compile_passes.helpers import fuse

E, H, B, L, S = 32, 4, 2, 6, 8


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def random_module(cls: type = nn.MultiheadAttention, *sizes: int, **options) -> nn.Module:
    """A module in float64, all of its parameters random (biases start as zeros)."""
    module = cls(*(sizes or (E, H)), **options).double()
    for i, x in enumerate(module.parameters()):
        x.data = randn(*x.shape, seed=i) / 4
    return module


def results(run, module: nn.Module, inputs: tuple) -> list[torch.Tensor]:
    """The output, and the gradients of every floating point input and of all parameters."""
    inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
    out = run(*inputs)
    leaves = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    seed = randn(*out.shape, seed=9).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, seed, allow_unused=True)]


def check(function, module: nn.Module, *inputs: torch.Tensor, cores: int = 1, **options):
    """Fused, with eager outputs and gradients."""
    fusion = fuse(function, **options)
    found, wanted = (results(run, module, inputs) for run in (fusion.run, function))
    torch.testing.assert_close(found, wanted)
    assert [x.stride() for x in found[:1]] == [x.stride() for x in wanted[:1]]
    assert fusion.fused == cores and not fusion.reasons, [str(f) for f in fusion.findings]
    assert not any(n.target is F.multi_head_attention_forward for n in fusion.graphs[-1].nodes)
    return fusion


def hidden(*shape: int) -> torch.Tensor:
    """A mask that is True where a key is hidden; every query keeps the first."""
    mask = randn(*shape, seed=3) > 0.5
    mask[..., 0] = False
    return mask


def additive(*shape: int) -> torch.Tensor:
    return randn(*shape, seed=4).masked_fill(hidden(*shape), float("-inf"))


def triangle() -> torch.Tensor:
    return torch.ones(L, S, dtype=torch.bool).triu(1)


MASKS = {
    "none": lambda: {},
    "bool": lambda: {"attn_mask": hidden(L, S)},
    "bool per head": lambda: {"attn_mask": hidden(B * H, L, S)},
    "float": lambda: {"attn_mask": additive(L, S)},
    "float per head": lambda: {"attn_mask": additive(B * H, L, S)},
    "padding": lambda: {"key_padding_mask": hidden(B, S)},
    "float padding": lambda: {"key_padding_mask": additive(B, S)},
    "both": lambda: {"attn_mask": hidden(L, S), "key_padding_mask": hidden(B, S)},
    "both float": lambda: {"attn_mask": additive(B * H, L, S), "key_padding_mask": additive(B, S)},
    "causal": lambda: {"attn_mask": triangle(), "is_causal": True},
    "causal and padding": lambda: {
        "attn_mask": triangle(),
        "key_padding_mask": hidden(B, S),
        "is_causal": True,
    },
}
MODULES = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other dimensions": {"kdim": 24, "vdim": 40},
    "bias of keys": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "both keys": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 24},
}


def qkv_of(module: nn.MultiheadAttention) -> tuple[torch.Tensor, ...]:
    sizes = ((L, E), (S, module.kdim), (S, module.vdim))
    inputs = [randn(n, B, size, seed=20 + i) for i, (n, size) in enumerate(sizes)]
    return tuple(x.transpose(0, 1) if module.batch_first else x for x in inputs)


CASES = [(options, mask) for options in ("plain", "both keys") for mask in MASKS]
CASES += [(options, "both") for options in MODULES if options not in ("plain", "both keys")]


@pytest.mark.parametrize("weights", [True, False], ids=["weights dropped", "no weights"])
@pytest.mark.parametrize("options, mask", CASES)
def test_options_match_eager(options, mask, weights):
    module, given = random_module(**MODULES[options]), MASKS[mask]()

    def attend(q, k, v):
        return module(q, k, v, need_weights=weights, **given)[0]

    check(attend, module, *qkv_of(module))


@pytest.mark.parametrize("weights", [True, False])
def test_masks_get_gradients(weights):
    module = random_module(dropout=0.5).eval()

    def attend(q, k, v, mask, padding):
        return module(q, k, v, padding, weights, mask, average_attn_weights=False)[0]

    check(attend, module, *qkv_of(module), randn(L, S), randn(B, S))


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("mask", [None, hidden(L, S), hidden(H, L, S)], ids=["none", "2-D", "3-D"])
def test_inputs_without_a_batch_are_fused(mask, weights):
    module, padding = random_module(), None if mask is None else hidden(S)

    def attend(q, k):
        return module(q, k, k, padding, weights, mask)[0]

    check(attend, module, randn(L, E), randn(S, E))


@pytest.mark.parametrize("weights", [True, False])
def test_static_keys_and_values_are_fused(weights):
    module = random_module()

    def attend(x, k, v):
        return F.multi_head_attention_forward(
            x, x, x, E, H, module.in_proj_weight, module.in_proj_bias, None, None, True, 0.0,
            module.out_proj.weight, module.out_proj.bias, need_weights=weights,
            static_k=k, static_v=v,
        )[0]  # fmt: skip

    check(attend, module, randn(L, B, E), randn(B * H, S, E // H), randn(B * H, S, E // H))


def test_rows_without_keys_give_zero():
    """0 as in SDPA, where eager attention with weights gives NaN."""
    module, padding = random_module(batch_first=True), torch.tensor([[True] * S, [False] * S])

    def attend(x, weights):
        return module(x, x, x, padding, need_weights=weights)[0]

    check(lambda x: attend(x, False), module, randn(B, S, E))
    x = randn(B, S, E)
    assert attend(x, True)[0].isnan().all()
    torch.testing.assert_close(fuse(lambda x: attend(x, True)).run(x), attend(x, False))


@pytest.mark.parametrize("train", [False, True])
def test_traced_nodes_require_grad_as_the_call_does(train):
    """Rules of the matcher depend on it."""
    module = random_module()
    fusion = fuse(lambda x: module(x, x, x)[0])
    with torch.set_grad_enabled(train):
        fusion.run(randn(L, B, E))
    linear = torch.ops.aten.linear.default
    projected = [n.meta["example_value"] for n in fusion.graphs[-1].nodes if n.target is linear]
    assert [x.requires_grad for x in projected] == [train, train]


@pytest.mark.parametrize("weights", [True, False])
def test_dropout_is_applied_in_training_only(weights):
    module, x = random_module(dropout=0.25), randn(L, B, E)
    fusion = fuse(lambda x: module(x, x, x, need_weights=weights)[0])
    assert not torch.equal(fusion.run(x), fusion.run(x))
    assert "dropout_p=0.25" in fusion.findings[0].call
    module = random_module(dropout=0.25).eval()
    assert "dropout" not in check(lambda x: module(x, x, x)[0], module, x).findings[0].call


@pytest.mark.parametrize("weights", [True, False])
def test_one_graph_for_all_lengths_and_batches(weights):
    module = random_module(batch_first=True)

    def attend(q, k, padding):
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
        return module(q, k, k, padding, weights, mask)[0]

    fusion = fuse(attend, dynamic=True)
    for batch, queries, keys in ((2, 5, 7), (3, 9, 9), (5, 4, 31)):
        inputs = randn(batch, queries, E), randn(batch, keys, E), hidden(batch, keys)
        found, wanted = (results(run, module, inputs) for run in (fusion.run, attend))
        torch.testing.assert_close(found, wanted)
    assert len(fusion.graphs) == fusion.fused == 1


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("weights", [True, False])
def test_autocast_keeps_the_result_dtype(weights, outside):
    module, x = random_module(add_zero_attn=True).float(), randn(L, B, E).float()

    def inside(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x, x, x, need_weights=weights)[0]

    function = (lambda x: module(x, x, x, need_weights=weights)[0]) if outside else inside
    fusion = fuse(function)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
        found, wanted = fusion.run(x), function(x)
    assert fusion.fused == 1 and found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_are_fused(mode):
    module, x = random_module().eval(), randn(L, B, E)

    def inside(x):
        with mode():
            return module(x, x, x)[0]

    for function in (inside, mode()(lambda x: module(x, x, x)[0])):
        fusion = fuse(function)
        torch.testing.assert_close(fusion.run(x), function(x))
        assert fusion.fused == 1 and not fusion.run(x).requires_grad


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointed_regions_are_fused(autocast):
    """The body is a separate graph, which does not record the modes that it runs under."""
    module, x = random_module(), randn(L, B, E)
    if autocast:
        module, x = module.float(), x.float()

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return checkpoint(lambda x: module(x, x, x)[0], x * 1.0, use_reentrant=False)

    fusion = fuse(function, aot=True)
    found, wanted = (results(run, module, (x,)) for run in (fusion.run, function))
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= b.norm() * (0.02 if autocast else 1e-9)
    assert fusion.fused == 1


LAYERS = {
    "encoder layer": (lambda: random_module(nn.TransformerEncoderLayer, E, H, 16, dropout=0.0), 1),
    "decoder layer": (lambda: random_module(nn.TransformerDecoderLayer, E, H, 16, dropout=0.0), 2),
    "transformer": (lambda: random_module(nn.Transformer, E, H, 1, 2, 16, dropout=0.0), 5),
}


@pytest.mark.parametrize("make, cores", LAYERS.values(), ids=LAYERS.keys())
def test_layers_are_fused(make, cores):
    layer = make()
    inputs = (randn(L, B, E),) if cores == 1 else (randn(L, B, E), randn(L, B, E, seed=1))
    check(layer, layer, *inputs, cores=cores)
    check(layer.eval(), layer, *inputs, cores=cores)


def test_encoder_layers_fuse_without_their_fast_path():
    layer, x = (
        random_module(nn.TransformerEncoderLayer, E, H, 16, batch_first=True).eval(),
        randn(B, L, E),
    )
    wanted = layer(x)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            fusion = fuse(layer)
            torch.testing.assert_close(fusion.run(x), wanted)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert fusion.fused == 1


def test_a_transformer_with_mask_hints_is_fused():
    model = random_module(nn.Transformer, E, H, 1, 1, 16, dropout=0.0, batch_first=True)

    def run(source, target):
        causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
        padding = torch.zeros(B, L, dtype=torch.bool)
        padding[0, -2:] = True
        return model(
            source, target, tgt_mask=causal, tgt_is_causal=True,
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip

    fusion = check(run, model, randn(B, L, E), randn(B, L, E, seed=1), cores=3)
    assert [f.masks for f in fusion.findings] == ["dense attn_mask", "is_causal", "dense attn_mask"]


@pytest.mark.parametrize("weights", [True, False])
def test_exported_programs_with_weights_are_fused(weights):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = random_module(batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=weights)[0]

    model, x = Model().eval(), randn(B, L, E)
    program = torch.export.export(model, (x,)).module()
    findings = compile_passes.fuse_module(program)
    torch.testing.assert_close(program(x), model(x))
    found = [(f.fused, f.operation) for f in findings]  # without weights, export makes SDPA of it
    assert found == [(weights, "softmax" if weights else "scaled_dot_product_attention")]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_rewrites_are_verified(mask, weights):
    module, given, findings = random_module(add_zero_attn=True), mask(), []

    def backend(gm, example_inputs):
        findings.extend(compile_passes.fuse_module(gm, verify=True))
        return gm.forward

    torch._dynamo.reset()
    counters.clear()
    attend = torch.compile(
        lambda q, k, v: module(q, k, v, need_weights=weights, **given)[0], backend=backend
    )
    attend(*(x.requires_grad_() for x in qkv_of(module)))
    assert [f.fused for f in findings] == [True] and counters["fa_ops"]["verified"] == 1


@pytest.mark.parametrize("weights, dynamic", [(True, None), (False, True)])
def test_inductor_fuses(weights, dynamic):
    module, x = random_module(batch_first=True), randn(B, L, E)

    def attend(x):
        return module(x, x, x, need_weights=weights)[0]

    torch._dynamo.reset()
    counters.clear()
    with fresh_cache(), compile_passes.install():
        found = results(torch.compile(attend, dynamic=dynamic), module, (x,))
    torch.testing.assert_close(found, results(attend, module, (x,)))
    assert counters["fa_ops"]["fused"] == counters["fa_ops"]["softmaxes"] > 0
