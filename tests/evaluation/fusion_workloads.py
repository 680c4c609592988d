"""The workloads of `python -m tests.evaluation.fusion_bench speed`: what each variant runs.

A variant is a function that makes one step: a forward pass, or a forward and a backward pass. All
variants of a workload compute the same from the same weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import fa_ops
from compile_passes.install import fa_ops as fused_backend

# name: (attn_implementation, whether the pass runs)
IMPLEMENTATIONS = {
    "sdpa_fused": ("sdpa", True),
    "fa_ops": ("fa_ops", False),
    "sdpa": ("sdpa", False),
    "fused": ("eager", True),
    "inductor": ("eager", False),
    "padded": ("sdpa", True),
    "unpadded": ("sdpa", True),
}
LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of all workloads."""

    llama: dict
    layers: int = 8  # of a prefill; half of them in a training step
    prefill: int = 8192  # tokens, in a batch of 1
    train: int = 4096  # tokens, in a batch of 2
    gpt_layers: int = 12
    gpt_heads: int = 12
    gpt_batch: int = 12
    gpt_tokens: int = 1024
    heads: int = 32  # of the documents' queries; a quarter of them for keys
    flex_layers: int = 4
    documents: int = 8  # of lengths 1 : 2 : ... : 8 in `prefill` tokens

    @property
    def batch(self) -> tuple[int, int]:
        """Rows and tokens of the padded batch."""
        return 8, max(self.prefill // 8, 8)


Step = Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is measured, and the steps of its variants. Times are divided by those of `base`."""

    name: str
    describe: Callable[[Sizes], str]
    base: str
    variants: tuple[str, ...]
    others: tuple[str, ...]  # variants that run only where they are asked for
    steps: Callable[[Sizes, str, list[str]], Iterable[tuple[str, Step]]]


def compiled(function: Callable, fused: bool) -> Callable:
    """A function under torch.compile, with the fusion pass or without it."""
    return torch.compile(function, backend=fused_backend if fused else "inductor", dynamic=False)


def training_step(
    function: Callable[[], Tensor], leaves: Iterable[Tensor], grad: Tensor | None = None
) -> Step:
    """A forward and a backward pass, of the mean square unless the gradient of the result is given;
    the gradients of the leaves are dropped.
    """
    leaves = list(leaves)

    def step() -> Tensor:
        out = function()
        (out.float().square().mean() if grad is None else out).backward(grad)
        for leaf in leaves:
            leaf.grad = None
        return out.detach()

    return step


def inference_step(function: Callable[[], Tensor]) -> Step:
    """A forward pass without gradients."""

    def step() -> Tensor:
        with torch.no_grad():
            return function()

    return step


def llama(
    shape: dict, layers: int, implementation: str, device: str, like: nn.Module | None = None
):
    """A LlamaModel in bf16 with random weights, or with those of the model `like`."""
    from transformers import LlamaConfig, LlamaModel

    if implementation == "fa_ops":
        import hf_integration

        hf_integration.register()
    config = LlamaConfig(
        **shape,
        num_hidden_layers=layers,
        use_cache=False,
        max_position_embeddings=16384,
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaModel(config).to(torch.bfloat16)
    if like is not None:
        for parameter, shared in zip(model.parameters(), like.parameters(), strict=True):
            parameter.data = shared.data
    return model


def _left_padding(batch: int, tokens: int, device: str) -> Tensor:
    """A padding mask: row b is padded on the left by b / batch of its length."""
    first = torch.arange(batch, device=device)[:, None] * tokens // batch
    return (torch.arange(tokens, device=device) >= first).long()


def _llama_steps(
    layers: Callable[[Sizes], int],
    batch: Callable[[Sizes], tuple],
    train: bool,
    eager: bool = False,
):
    def steps(sizes: Sizes, device: str, variants: list[str]) -> Iterable[tuple[str, Step]]:
        ids = torch.randint(0, sizes.llama["vocab_size"], batch(sizes), device=device)
        first = None
        for variant in variants:
            implementation, fused = IMPLEMENTATIONS[variant]
            model = llama(sizes.llama, layers(sizes), implementation, device, first).train(train)
            first = first or model
            mask = _left_padding(*ids.shape, device) if variant == "padded" else None
            run = model if eager else compiled(model, fused)

            def forward(run=run, mask=mask) -> Tensor:
                return run(ids, attention_mask=mask).last_hidden_state

            made = training_step(forward, model.parameters()) if train else inference_step(forward)
            yield variant, made

    return steps


class Block(nn.Module):
    """A layer of GPT-2 as nanoGPT writes it, with a causal mask in a registered buffer."""

    def __init__(self, width: int, heads: int, tokens: int, buffered: bool) -> None:
        super().__init__()
        self.heads, self.buffered = heads, buffered
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        causal = torch.tril(torch.ones(tokens, tokens)).view(1, 1, tokens, tokens)
        self.register_buffer("bias", causal)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention, by the buffer or by the operator's flag."""
        if not self.buffered:
            return fa_ops.attention(q, k, v, is_causal=True)
        T = q.shape[2]
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        return torch.softmax(scores, dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a two-layer network, each with a residual."""
        B, T, C = x.shape
        parts = self.qkv(self.norms[0](x)).split(C, dim=2)
        q, k, v = (p.view(B, T, self.heads, C // self.heads).transpose(1, 2) for p in parts)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norms[1](x))


def _gpt_steps(sizes: Sizes, device: str, variants: list[str]) -> Iterable[tuple[str, Step]]:
    width, tokens = 64 * sizes.gpt_heads, sizes.gpt_tokens
    x = torch.randn(sizes.gpt_batch, tokens, width, device=device, dtype=torch.bfloat16)
    first: nn.Module | None = None
    for variant in variants:
        torch.manual_seed(0)
        with torch.device(device):
            blocks = (
                Block(width, sizes.gpt_heads, tokens, variant == "buffer")
                for _ in range(sizes.gpt_layers)
            )
            model = nn.Sequential(*blocks).to(torch.bfloat16)
        first = first or model
        for parameter, shared in zip(model.parameters(), first.parameters(), strict=True):
            parameter.data = shared.data
        run = compiled(model, fused=True)
        yield variant, training_step(lambda run=run: run(x), model.parameters())


def document_numbers(tokens: int, documents: int, device: str) -> Tensor:
    """The document of each token, of lengths 1 : 2 : ... : documents."""
    ends = torch.arange(1, documents + 1).cumsum(0) * tokens // (documents * (documents + 1) // 2)
    return torch.searchsorted(ends, torch.arange(tokens), right=True).to(device, torch.int32)


def _flex_steps(inside: bool):
    """Attentions of several layers, one after another, which share a BlockMask of documents."""

    def steps(sizes: Sizes, device: str, variants: list[str]) -> Iterable[tuple[str, Step]]:
        S, H = sizes.prefill, sizes.heads
        numbers = document_numbers(S, sizes.documents, device)
        starts = torch.searchsorted(numbers, numbers)
        positions = torch.arange(S, device=device) - starts

        def block_mask(numbers: Tensor) -> BlockMask:
            def keep(b, h, i, j):
                return (i >= j) & (numbers[i] == numbers[j])

            return create_block_mask(keep, None, None, S, S, device)

        def attend(q: Tensor, k: Tensor, v: Tensor, given: BlockMask | Tensor) -> Tensor:
            if inside:  # the documents of packed positions, as transformers finds them
                given = block_mask((given.diff(prepend=given[:1] - 1) != 1).cumsum(0))
            for _ in range(sizes.flex_layers):
                q = flex_attention(q, k, v, block_mask=given, enable_gqa=True)
            return q

        trained = device == "cuda"  # FlexAttention has no backward pass on a CPU
        shapes = ((1, H, S, 128), (1, H // 4, S, 128), (1, H // 4, S, 128))
        q, k, v, grad = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in (*shapes, shapes[0])
        )
        inputs = [x.requires_grad_(trained) for x in (q, k, v)]
        given = positions if inside else block_mask(numbers)
        for variant in variants:
            run = compiled(attend, variant == "flex_fused")

            def forward(run=run) -> Tensor:
                return run(*inputs, given)

            made = training_step(forward, inputs, grad) if trained else inference_step(forward)
            yield variant, made

    return steps


def _of_llama(
    name: str, words: str, layers, batch, train: bool = False, eager: bool = False
) -> Workload:
    def describe(sizes: Sizes) -> str:
        rows, tokens = batch(sizes)
        ending = ", not compiled" if eager else ""
        return f"{words} of {rows} x {tokens}, Llama of {layers(sizes)} layers{ending}"

    variants = ("fa_ops", "sdpa") if eager else ("sdpa_fused", "fa_ops", "sdpa")
    others = () if eager else ("fused", "inductor")
    steps = _llama_steps(layers, batch, train, eager)
    return Workload(name, describe, "fa_ops", variants, others, steps)


def _half(sizes: Sizes) -> int:
    return max(sizes.layers // 2, 1)


# the most important first
WORKLOADS = {
    workload.name: workload
    for workload in (
        _of_llama("prefill", "prefill", lambda s: s.layers, lambda s: (1, s.prefill)),
        _of_llama("train", "training step", _half, lambda s: (2, s.train), train=True),
        *(
            _of_llama(f"eager_{name}", words, layers, batch, train, eager=True)
            for name, words, layers, batch, train in (
                ("prefill", "prefill", lambda s: s.layers, lambda s: (1, s.prefill), False),
                ("train", "training step", _half, lambda s: (2, s.train), True),
            )
        ),
        Workload(
            "padded",
            lambda s: f"prefill of {s.batch[0]} x {s.batch[1]}, Llama of {s.layers} layers",
            "unpadded",
            ("padded", "unpadded"),
            (),
            _llama_steps(lambda s: s.layers, lambda s: s.batch, train=False),
        ),
        Workload(
            "buffer",
            lambda s: f"training step of {s.gpt_batch} x {s.gpt_tokens}, GPT-2",
            "is_causal",
            ("buffer", "is_causal"),
            (),
            _gpt_steps,
        ),
        *(
            Workload(
                name,
                lambda s, where=where: (
                    f"{s.flex_layers} layers of FlexAttention, {s.documents} documents in "
                    f"{s.prefill} tokens, BlockMask made {where} of the compiled function"
                ),
                "flex_fused",
                ("flex_fused", "flex"),
                (),
                _flex_steps(where == "inside"),
            )
            for name, where in (("packed", "inside"), ("documents", "outside"))
        ),
    )
}
