"""Models that are trained through derivatives: a discriminator, an energy, a velocity.

Each with fa_ops against the same model with dense attention, in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import fa_ops
import hf_integration

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


class Operators(TorchDispatchMode):
    """The names of the operators of fa_ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (name := str(function)).startswith("fa."):
            self.found.add(name.split(".")[1])
        return function(*args, **(kwargs or {}))


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(train: Callable[[str], tuple], operators: set[str], tolerance: float = 1e-10):
    """The results of training with fa_ops, by these operators, are those of eager attention."""
    with Operators() as seen:
        found = train(hf_integration.NAME)
    assert operators <= seen.found
    torch.testing.assert_close(found, train("eager"), rtol=tolerance, atol=tolerance)


def discriminator(attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **SIZES, **NO_DROPOUT, image_size=16, patch_size=4, num_labels=1,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).double()


def test_a_discriminator_with_a_gradient_penalty():
    """R1: the squared gradient of the score by real images."""

    def train(attention: str) -> tuple:
        model, images = discriminator(attention), drawn(2, 3, 16, 16).requires_grad_()
        score = model(images).logits
        (slope,) = torch.autograd.grad(score.sum(), images, create_graph=True)
        loss = F.softplus(-score).mean() + 5 * slope.square().sum((1, 2, 3)).mean()
        loss.backward()
        return loss.detach(), gradients(model)

    # the softmax of eager attention is one of float32
    assert_same(train, {"attention_jvp", "attention_backward_jvp"}, tolerance=1e-6)


def energy(attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SIZES, **NO_DROPOUT, vocab_size=10, attn_implementation=attention
    )
    return transformers.BertModel(config).double()


PADDING = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])


def test_an_energy_with_forces():
    """A loss of forces, the gradient of an energy, over atoms of which some are padding."""

    def train(attention: str) -> tuple:
        model, atoms = energy(attention), drawn(2, 7, 32).requires_grad_()
        states = model(inputs_embeds=atoms, attention_mask=PADDING).last_hidden_state
        total = (states.square() * PADDING.unsqueeze(-1)).sum()
        (forces,) = torch.autograd.grad(-total, atoms, create_graph=True)
        (forces - drawn(2, 7, 32, seed=2)).square().mean().backward()
        return forces.detach(), gradients(model)

    assert_same(train, {"attention_jvp", "attention_backward_jvp"})


@pytest.mark.parametrize("way", ["jvp", "jvp of grad", "vmap of jvp"])
def test_forward_mode_of_a_model(way):
    def train(attention: str) -> tuple:
        model, x, t = energy(attention), drawn(2, 7, 32), drawn(2, 7, 32, seed=2)
        run = lambda x: model(inputs_embeds=x, attention_mask=PADDING).last_hidden_state  # noqa: E731
        if way == "jvp":
            out, out_t = torch.func.jvp(run, (x,), (t,))
            (out - out_t).square().mean().backward()
            return out_t.detach(), gradients(model)
        total = lambda x: run(x).square().sum()  # noqa: E731
        if way == "vmap of jvp":
            one = lambda t: torch.func.jvp(run, (x,), (t,))[1]  # noqa: E731
            return (torch.func.vmap(one)(torch.stack([t, x])).detach(),)
        return (torch.func.jvp(torch.func.grad(total), (x,), (t,))[1].detach(),)

    assert_same(train, {"attention_jvp"})


class Block(nn.Module):
    """A block of a DiT: attention and an MLP, modulated by the times."""

    def __init__(self, width: int, heads: int, attend: Callable) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, g, d, e, h = self.modulation(F.silu(c)).unsqueeze(1).chunk(6, -1)
        y = F.layer_norm(x, x.shape[-1:]) * (1 + a) + b
        q, k, v = self.qkv(y).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + g * self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + h * self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + d) + e)


class TinyDiT(nn.Module):
    """The mean velocity u(z, r, t) of tokens between the times r and t."""

    def __init__(self, attend: Callable, width: int = 32) -> None:
        super().__init__()
        self.times = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width))
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(Block(width, 4, attend) for _ in range(2))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        c, x = self.times(torch.stack([r, t - r], -1)), self.first(z)
        for block in self.blocks:
            x = block(x, c)
        return self.last(x)


def test_a_dit_with_the_loss_of_meanflow():
    """u is trained towards v - (t - r) du/dt, a tangent along (v, 0, 1) (arXiv:2505.13447)."""

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)

    def train(attention: str) -> tuple:
        torch.manual_seed(0)
        attend = dense if attention == "eager" else fa_ops.attention
        model = TinyDiT(attend).double()
        data, noise = drawn(3, 10, 8), drawn(3, 10, 8, seed=2)
        r, t = torch.tensor([[0.1, 0.3, 0.0], [0.5, 0.9, 1.0]], dtype=torch.float64)
        velocity = noise - data
        z = data + t.view(-1, 1, 1) * velocity
        along = velocity, torch.zeros_like(r), torch.ones_like(t)
        u, dudt = torch.func.jvp(model, (z, r, t), along)
        target = (velocity - (t - r).view(-1, 1, 1) * dudt).detach()
        (u - target).square().mean().backward()
        return u.detach(), dudt.detach(), gradients(model)

    assert_same(train, {"attention_jvp", "attention_backward"})
