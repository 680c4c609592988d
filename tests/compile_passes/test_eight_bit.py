"""`eight_bit`: what is fused into quantized_attention, and what keeps 16-bit products."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compile_passes
from compile_passes.emit.replacement import module_path


class Attention(nn.Module):
    """Attention written by hand, or SDPA, over the features of two heads."""

    def __init__(self, by_hand=True):
        super().__init__()
        self.project, self.by_hand = nn.Linear(64, 192), by_hand

    def forward(self, x, *others):
        q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        if not self.by_hand:
            return (
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
        scores = q @ k.mT / 32**0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention(False), Attention(), Attention()])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    torch._dynamo.reset()
    return Model()


def products(function, *inputs, **options):
    report = compile_passes.explain(function, *inputs, eight_bit=True, **options)
    return [f.products or f.reason for f in report.findings]


def test_compiled_models_have_8_bit_products(model):
    x = torch.randn(2, 70, 64)
    with torch.no_grad(), compile_passes.install(eight_bit=True):
        wanted = model(x)
        found = torch.compile(model)(x)
    error = (found - wanted).norm() / wanted.norm()
    assert 1e-3 < error < 0.05


@pytest.mark.parametrize("dynamic", [False, True])
def test_named_modules_keep_16_bits(dynamic, model):
    names = ("blocks.0", "3")
    with torch.no_grad():
        found = products(model, torch.randn(2, 70, 64), sixteen_bit=names, dynamic=dynamic)
    kept = [f"16-bit: sixteen_bit names {name}" for name in names]
    assert found == [kept[0], "8-bit", "8-bit", kept[1]]


def test_training_keeps_16_bits(model):
    found = products(model, torch.randn(2, 70, 64))
    assert found.count("16-bit: a gradient may be recorded") == 3
    assert found[1] == ("torch computes it as fast; products: 16-bit: a gradient may be recorded")


def attend(q, k, v, mask=None, p=0.0):
    scores = q @ k.mT
    if mask is not None:
        scores = scores + mask
    return F.dropout(scores.softmax(-1), p) @ v


def tensors(queries=40, keys=40, dtype=torch.float32):
    return [torch.randn(1, 2, n, 16, dtype=dtype) for n in (queries, keys, keys)]


REFUSED = {
    "a dense mask": lambda: (*tensors(), torch.randn(40, 40)),
    "dropout": lambda: (*tensors(), None, 0.5),
    "torch.float64": lambda: tensors(dtype=torch.float64),
    "at most 16 queries, for which all keys would be quantised": lambda: tensors(16, 40),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_keeps_16_bits(reason):
    torch._dynamo.reset()
    assert products(attend, *REFUSED[reason]()) == [f"16-bit: {reason}"]


@pytest.mark.parametrize("sizes", [(40, 40), (17, 40), (16, 16)])
def test_other_calls_have_8_bits(sizes):
    torch._dynamo.reset()
    assert products(attend, *tensors(*sizes)) == ["8-bit"]


def test_windows_and_log_sums_are_computed():
    def function(q, k, v):
        scores = q @ k.mT / 4
        i, j = torch.arange(40)[:, None], torch.arange(40)
        scores = scores.masked_fill((i - j).abs() > 9, float("-inf"))
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    torch._dynamo.reset()
    q, k, v = tensors()
    (finding,) = compile_passes.explain(function, q, k, v, eight_bit=True).findings
    assert finding.call.startswith("fa::quantized_attention(") and "window_left=9" in finding.call
    assert str(finding).splitlines()[2] == "    products: 8-bit"
    with compile_passes.install(eight_bit=True, verify=True):
        found = torch.compile(function)(q, k, v)
    for a, b in zip(found, function(q, k, v)):
        assert 0 < (a - b).norm() < 0.06 * b.norm()


def test_options_that_differ_are_refused():
    with compile_passes.install(eight_bit=True):
        with pytest.raises(ValueError, match="eight_bit must be True, as in the pass"):
            compile_passes.install()
        with pytest.raises(ValueError, match=r"sixteen_bit must be \(\), as in the pass"):
            compile_passes.install(eight_bit=True, sixteen_bit=["a"])


WRONG = {
    "verify must be a bool, got 1": {"verify": 1},
    "eight_bit must be a bool, got 1": {"eight_bit": 1},
    "sixteen_bit must hold names of modules, got 'blocks.0'": {
        "eight_bit": True, "sixteen_bit": "blocks.0",
    },
    r"sixteen_bit must be empty without eight_bit, got \['a'\]": {"sixteen_bit": ["a"]},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_refused(message):
    with pytest.raises((TypeError, ValueError), match=message):
        compile_passes.install(**WRONG[message])
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        compile_passes.explain(torch.nn.Linear(2, 2), torch.zeros(1, 2), **WRONG[message])
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        compile_passes.fuse(torch.fx.Graph(), **WRONG[message])


PATHS = {
    "L['self'].blocks.0.attn": "L.self.blocks.0.attn",
    "L['self']._modules['blocks']._modules['0']": "L.self.blocks.0",
    "getattr(getattr(L['self'].blocks, '0').inner, '1').attn": "L.self.blocks.0.inner.1.attn",
    "": "",
}


@pytest.mark.parametrize("path", PATHS)
def test_paths_of_modules(path):
    node = torch.fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"0": ("L['self']", Model), "1": (path, Attention)}
    assert module_path(node) == PATHS[path]
