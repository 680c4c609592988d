"""Training: packing, checkpointing, mixed precision, and the Trainer."""

import os
import random

import pytest
import torch
from tiny_models import VOCAB, build, padding, switch, tokens
from transformers import (
    DataCollatorWithFlattening,
    StaticCache,
    Trainer,
    TrainingArguments,
)

import fa_ops
from hf_integration import call_rewrites
from hf_integration.encodings import MaskArguments, PackingHint

LENGTHS = (5, 7, 3)


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def collate(**options) -> dict:
    rows = [{"input_ids": row, "labels": row} for row in documents()]
    return DataCollatorWithFlattening(**options)(rows)


def alone(model) -> torch.Tensor:
    switch(model, "eager")
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row])).logits for row in documents()], 1)


BATCHES = {
    "cu_seq_lens": ({"return_flash_attn_kwargs": True}, {}),
    "positions, no cache": ({}, {"use_cache": False}),
    "positions, a cache": ({}, {"use_cache": True}),
    "positions, a full mask": ({}, {"attention_mask": torch.ones(1, sum(LENGTHS))}),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gemma3_text", "gpt_oss"])
def test_flattened_documents_do_not_attend_each_other(model_type, kind, packed_calls):
    """transformers itself separates only the second kind of batch, and for gpt-oss none."""
    model = build(model_type)
    collator, options = BATCHES[kind]
    batch = collate(**collator) | options
    batch.pop("labels")
    ours = model(**batch).logits
    torch.testing.assert_close(ours, alone(model), atol=1e-4, rtol=1e-4)
    if model_type == "llama":
        assert packed_calls == [3, 3]


def test_with_sdpa_and_a_cache_documents_attend_each_other():
    """Negative control."""
    model = build("llama")
    batch = collate()
    switch(model, "sdpa")
    leaking = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    assert not torch.allclose(leaking, alone(model), atol=1e-2)


def test_positions_are_read_once_per_forward_pass(monkeypatch):
    reads = []
    find = call_rewrites._find_documents
    monkeypatch.setattr(call_rewrites, "_find_documents", lambda *a: reads.append(1) or find(*a))
    model = build("llama")
    model(**{k: v for k, v in collate().items() if k != "labels"})
    model(tokens(1))
    assert len(reads) == 2


KEPT = torch.ones(1, sum(LENGTHS), dtype=torch.long)
CALLS = {
    "no cache": {"use_cache": False},
    "a cache": {"use_cache": True},
    "a mask": {"attention_mask": KEPT, "use_cache": False},
    "a mask and a cache": {"attention_mask": KEPT},
    "a static cache": {"static": True},
    "a mask and a static cache": {"attention_mask": KEPT, "static": True},
}
MODES = {
    "grad": (lambda model: model, torch.enable_grad),
    "no_grad": (lambda model: model, torch.no_grad),
    "inference": (lambda model: model, torch.inference_mode),
    "compiled": (
        lambda model: torch.compile(model, backend="eager", fullgraph=True),
        torch.no_grad,
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_packing_is_the_same_in_every_mode(model_type, mode):
    """One row of documents that are separated by positions, with any other arguments."""
    make, context = MODES[mode]
    torch._dynamo.reset()
    model = build(model_type)
    expected = alone(model)
    switch(model, "fa_ops")
    batch = collate()
    batch.pop("labels")
    calls = CALLS
    if mode == "compiled":  # each call is a graph of its own
        calls = ["a cache"]
        if model_type == "llama":
            calls = ["no cache", "a mask and a cache", "a mask and a static cache"]
    for name in calls:
        options = dict(CALLS[name])
        if options.pop("static", False):
            options["past_key_values"] = StaticCache(config=model.config, max_cache_len=24)
        with context():
            ours = make(model)(**batch, **options).logits
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4, msg=f"{name}, {mode}")


@pytest.mark.parametrize("mode", ["no_grad", "compiled"])
def test_packed_and_padded_documents_do_not_attend_each_other(mode):
    """Padding behind the documents, for instance to a multiple of some length."""
    make, context = MODES[mode]
    torch._dynamo.reset()
    model = build("llama")
    expected = alone(model)
    switch(model, "fa_ops")
    batch, S = collate(), sum(LENGTHS)
    ids = torch.nn.functional.pad(batch["input_ids"], (0, 4))
    positions = torch.nn.functional.pad(batch["position_ids"], (0, 4))
    kept = torch.nn.functional.pad(KEPT, (0, 4))
    with context():
        ours = make(model)(ids, attention_mask=kept, position_ids=positions).logits
    torch.testing.assert_close(ours[:, :S], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "not counted"])
def test_packed_documents_with_padding_inside(counted):
    """Also as the first token of a document, whether positions count padding or not."""
    model = build("llama")
    kept = [
        torch.tensor([[1, 1, 0, 1, 1]]),
        torch.tensor([[0, 1, 1, 0, 0, 1, 1]]),
        torch.ones(1, 3),
    ]
    positions = [
        torch.arange(k.shape[1])[None] if counted else (k.cumsum(1) - 1).long().clamp(min=0)
        for k in kept
    ]
    switch(model, "eager")
    with torch.no_grad():
        expected = [
            model(torch.tensor([row]), attention_mask=k, position_ids=p).logits
            for row, k, p in zip(documents(), kept, positions)
        ]
        switch(model, "fa_ops")
        mask, ids = torch.cat(kept, 1), collate()["input_ids"]
        ours = model(ids, attention_mask=mask, position_ids=torch.cat(positions, 1)).logits
    seen = mask.bool()
    torch.testing.assert_close(ours[seen], torch.cat(expected, 1)[seen], atol=1e-4, rtol=1e-4)


def test_a_block_of_an_image_stays_within_its_document():
    """The first two tokens of each document are a block, which attends both ways."""
    ends = torch.tensor([2, 2, 3, 5, 5, 6], dtype=torch.int32)
    ranges = torch.stack([torch.zeros_like(ends), ends], -1)[None, None]
    mask = MaskArguments(key_ranges=ranges, packing=PackingHint.POSSIBLE)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    found = call_rewrites.within_positions(mask, positions, (6, 6), is_whole=True).key_ranges[0, 0]
    assert found.tolist() == [[0, 2], [0, 2], [0, 3], [3, 5], [3, 5], [3, 6]]


def drawn_positions(rng: random.Random, S: int) -> list[int]:
    """Positions of one row: a run with gaps, repeats, in reverse, or restarts of either."""
    kind, first = rng.choice(["gaps", "repeats", "reversed", "restarts"]), rng.choice([0, 2])
    if kind == "gaps":
        return sorted(rng.sample(range(first, first + 2 * S), S))
    if kind == "repeats":
        return sorted(rng.choices(range(first, first + S), k=S))
    if kind == "reversed":
        return list(range(first, first + S))[::-1]
    row = []
    while len(row) < S:
        row += [first, *sorted(rng.sample(range(first + 1, first + 9), rng.randint(0, 6)))]
    return row[:S]


def document_starts(row: list[int], kept: list[int] | None, at_gaps: bool) -> list[bool]:
    """Where documents begin: transformers' rule for masks, or else at the smallest position."""
    starts = []
    for i, position in enumerate(row):
        if at_gaps:
            starts.append(i > 0 and position != row[i - 1] + 1)
        elif kept is None:
            starts.append(position == min(row))
        else:
            smallest = min(p for p, k in zip(row, kept) if k)
            starts.append(bool(kept[i]) and position == smallest)
    return starts


@pytest.mark.parametrize("fill", [0, 1])
@pytest.mark.parametrize(
    "kept, positions, lengths",
    [
        ([0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 2, 3, 1, 2, 3], [6, 3]),  # counted from 1
        ([0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 2, 0, 1], [6, 2]),
        ([0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3], [7]),
        ([0, 1, 1, 1, 1, 0, 0], [1, 2, 1, 2], [3, 4]),
        ([1, 0, 0, 0, 1, 1], [0, 1, 2], [6]),  # one token before the padding
        ([1, 1, 0, 0, 0, 0, 1, 1], [0, 1, 2, 3], [8]),
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_padding_with_the_smallest_position_begins_no_document(
    model_type, kept, positions, lengths, fill
):
    S, numbers = len(kept), iter(positions)
    row = torch.tensor([[next(numbers) if k else fill for k in kept]])
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    keep = (document[:, None] == document).tril() & torch.tensor(kept).bool()
    model, ids, seen = build(model_type), tokens(1, S), torch.tensor(kept).bool()
    if model_type == "mistral":
        keep = keep & torch.ones(S, S).triu(1 - model.config.sliding_window).bool()
    added = torch.zeros(1, 1, S, S).masked_fill(~keep, torch.finfo(torch.float32).min)
    with torch.no_grad():
        ours = model(ids, attention_mask=torch.tensor([kept]), position_ids=row).logits
        switch(model, "eager")
        expected = model(ids, attention_mask=added, position_ids=row).logits
    torch.testing.assert_close(ours[:, seen], expected[:, seen], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", range(int(os.environ.get("FA_OPS_POSITIONS_CASES", "60"))))
def test_drawn_positions_are_those_of_eager_attention(case):
    """Eager attention gets the mask of the documents that the positions mean."""
    rng = random.Random(f"positions {case}")
    S, B = rng.randint(2, 14), rng.choice([1, 1, 2])
    kind = rng.choice(["", "mask", "holes", "left", "right"])
    cached = rng.random() < 0.5
    row = drawn_positions(rng, S)
    kept = None if not kind else [1] * S
    if kind == "holes":
        kept = [1] + [int(rng.random() < 0.7) for _ in range(S - 1)]
    elif kind in ("left", "right"):
        kept = [0] * rng.randint(1, S - 1)
        kept = (kept + [1] * S)[:S] if kind == "left" else ([1] * S)[len(kept) :] + kept
    if kept is not None:
        fill = rng.choice([-2, 9])  # padding has any position
        row = [p if k else fill for p, k in zip(row, kept)]
    plain = not kind and not cached  # then transformers' own mask separates documents
    separates = plain or B == 1
    starts = document_starts(row, kept, plain) if separates else [False] * S
    document = torch.tensor(starts).cumsum(0)
    keep = (document[:, None] == document) & torch.ones(S, S).tril().bool()
    mask = None
    if kept is not None:
        keep = keep & torch.tensor(kept).bool()
        mask = torch.tensor([kept] * B)
    ids = tokens(1, S, seed=case).expand(B, -1)
    inputs = {"position_ids": torch.tensor([row] * B), "use_cache": cached}
    added = torch.zeros(B, 1, S, S).masked_fill(~keep, torch.finfo(torch.float32).min)
    model = build(rng.choice(["llama", "qwen2"]))
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, **inputs).logits
        switch(model, "eager")
        expected = model(ids, attention_mask=added, **inputs).logits
    seen = slice(None) if kept is None else torch.tensor(kept).bool()
    torch.testing.assert_close(ours[:, seen], expected[:, seen], atol=1e-4, rtol=1e-4)


def test_exported_programs_separate_the_documents_of_their_inputs():
    """Not those of the example inputs."""
    model = build("mistral")
    expected = alone(model)
    switch(model, "fa_ops")
    batch = collate()
    plain = {"position_ids": torch.arange(sum(LENGTHS))[None], "use_cache": False}
    with torch.no_grad():
        program = torch.export.export(model, (batch["input_ids"],), plain, strict=False)
        packed = {"position_ids": batch["position_ids"], "use_cache": False}
        ours = program.module()(batch["input_ids"], **packed).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_cu_seq_lens_separate_documents_despite_a_mask(compiled):
    make, context = MODES["compiled" if compiled else "no_grad"]
    torch._dynamo.reset()
    model = build("llama")
    expected = alone(model)
    switch(model, "fa_ops")
    batch = collate(return_flash_attn_kwargs=True)
    batch.pop("labels")
    holes = KEPT.clone()
    holes[0, 3] = 0
    for kept in (KEPT, holes):
        with context():
            ours = make(model)(**batch, attention_mask=kept).logits
        torch.testing.assert_close(ours[:, 5:], expected[:, 5:], atol=1e-4, rtol=1e-4)


def test_gradients_of_packed_documents_are_those_of_single_documents():
    model = build("gemma3_text")
    batch = collate(return_flash_attn_kwargs=True)
    batch.pop("labels")
    weight = model.model.layers[0].self_attn.k_proj.weight
    gradients = []
    for out in (model(**batch).logits, None):
        if out is None:
            switch(model, "eager")
            out = torch.cat([model(torch.tensor([row])).logits for row in documents()], 1)
        gradients.append(torch.autograd.grad(out.square().mean(), weight)[0])
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("packed, reentrant", [(False, False), (True, False), (True, True)])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_checkpointing_repeats_dropout_and_packing(packed, reentrant):
    model = build("llama", attention_dropout=0.2).train()
    ids = tokens()
    batch = collate(return_flash_attn_kwargs=True) if packed else dict(input_ids=ids, labels=ids)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
            model.gradient_checkpointing_enable(**options)
        torch.manual_seed(0)
        model.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, plain)


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_has_the_losses_of_eager_attention(bf16, tmp_path):
    """Three steps from the same weights have the losses of eager attention."""
    losses = {}
    for name in ("eager", "fa_ops"):
        model = build("llama").train()
        switch(model, name)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=bf16,
            disable_tqdm=True,
        )
        rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens(6)]
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        history = trainer.state.log_history
        losses[name] = torch.tensor([row["loss"] for row in history if "loss" in row])
    assert len(losses["eager"]) == 3
    tolerance = 2e-2 if bf16 else 1e-4
    torch.testing.assert_close(losses["fa_ops"], losses["eager"], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtypes", ["fff", "fbb", "bff", "ffb"])
def test_autocast_accepts_mixed_dtypes(dtypes):
    """Rotary embeddings, norms and caches return different dtypes under autocast."""
    from hf_integration import fa_ops_attention_forward

    kinds = {"f": torch.float32, "b": torch.bfloat16}
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, 2, 9, 16, generator=generator) for _ in range(3)]
    mixed = [t.to(kinds[kind]).requires_grad_() for t, kind in zip(exact, dtypes, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = fa_ops_attention_forward(torch.nn.Module(), *mixed, is_causal=True)
    assert out.dtype == torch.bfloat16
    expected = fa_ops.attention(*exact, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=3e-2)
    gradients = torch.autograd.grad(out.float().square().sum(), mixed)
    assert [g.dtype for g in gradients] == [t.dtype for t in mixed]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("model_type", ["mistral", "gpt_oss"])
def test_gradients_per_sample_are_those_of_eager_attention(model_type, padded):
    """The host cannot read tensors that are mapped by vmap."""
    model, inputs = build(model_type), {"input_ids": tokens()}
    inputs["position_ids"] = torch.arange(12).expand(2, -1).contiguous()
    if padded or model_type == "mistral":  # without a mask, transformers reads positions
        inputs["attention_mask"] = padding(side="right") if padded else torch.ones(2, 12).long()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, inputs):
        inputs = {name: x[None] for name, x in inputs.items()}
        logits = torch.func.functional_call(model, parameters, (), inputs | {"use_cache": False})[0]
        kept = inputs.get("attention_mask", torch.ones(1, 12))
        return (logits.square() * kept[..., None]).mean()

    found = []
    for implementation in ("eager", "fa_ops"):
        switch(model, implementation)
        found.append(torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, inputs))
    for name, eager in found[0].items():
        assert (found[1][name] - eager).abs().max() <= 2e-4 * eager.abs().max().clamp(min=1e-4)
