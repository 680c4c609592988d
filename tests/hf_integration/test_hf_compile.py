"""torch.compile(fullgraph=True): one graph, compact masks, and the results of eager mode."""

import pytest
import torch
from tiny_models import build, padding, switch, tokens
from transformers import CompileConfig, DynamicCache, StaticCache

from hf_integration.encodings import CompactMask

FAMILIES = ["llama", "mistral", "gemma3_text", "gpt_oss", "bert"]


def is_materialised(value) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, CompactMask)


class Graphs:
    """A backend that records the graphs and runs them unchanged."""

    def __init__(self):
        self.calls, self.shapes = [], []

    def __call__(self, graph, inputs):
        self.calls.append(
            [node for node in graph.graph.nodes if "fa.attention" in str(node.target)]
        )
        values = (node.meta.get("example_value") for node in graph.graph.nodes)
        self.shapes += [tuple(v.shape) for v in values if is_materialised(v)]
        return graph.forward

    def square(self, Sq: int, Sk: int | None = None) -> list[tuple]:
        """The shapes of all tensors in the graphs that end with (Sq, Sk)."""
        return [shape for shape in self.shapes if shape[-2:] == (Sq, Sk or Sq)]

    def masks(self) -> list[str]:
        """How the attention calls of the last graph are passed their masks."""
        return [
            "lengths" if "kv_cache" in str(node.target)
            else "key_ranges" if "key_ranges" in node.kwargs
            else "dense" if len(node.args) > 3 and node.args[3] is not None
            else "causal" if len(node.args) > 5 and node.args[5] else "full"
            for node in self.calls[-1]
        ]  # fmt: skip


def compiled(model, **options):
    torch._dynamo.reset()
    graphs = Graphs()
    return torch.compile(model, backend=graphs, fullgraph=True, **options), graphs


def logits(out):
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize("model_type", FAMILIES)
def test_several_lengths_are_one_graph(model_type):
    model = build(model_type)
    run, graphs = compiled(model, dynamic=True)
    for S in (9, 12, 16, 21):
        ids = tokens(S=S)
        with torch.no_grad():
            torch.testing.assert_close(logits(run(ids)), logits(model(ids)))
    assert len(graphs.calls) == 1
    expected = {"bert": {"full"}, "llama": {"causal"}, "mistral": {"key_ranges"}}
    assert set(graphs.masks()) == expected.get(model_type, {"causal", "key_ranges"})


@pytest.mark.parametrize(("model_type", "holes"), [("llama", False), ("mistral", True)])
def test_pieces_of_one_row_over_a_dynamic_cache(model_type, holes):
    """Positions could separate packed documents only within a piece."""
    model, ids = build(model_type), tokens(B=1)
    mask = torch.ones_like(ids)
    mask[:, 3] = int(not holes)
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as generate() counts them
    run, _ = compiled(model)
    results = []
    for call, name in ((run, "fa_ops"), (model, "eager")):
        switch(model, name)
        cache, parts = DynamicCache(config=model.config), []
        with torch.no_grad():
            for piece in (slice(0, 6), slice(6, 12)):
                part = {"attention_mask": mask[:, : piece.stop]} if holes else {}
                part |= {"position_ids": positions[:, piece], "past_key_values": cache}
                parts.append(call(ids[:, piece], **part).logits)
        results.append(torch.cat(parts, 1)[mask == 1])
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def mask_with(kind: str, S: int) -> torch.Tensor:
    mask = padding(S=S, side="right" if kind == "right" else "left")
    if kind == "holes":
        mask[:, [6, 9]] = 0
    return mask


@pytest.mark.parametrize(
    "model_type, kind", [*((name, "holes") for name in FAMILIES), ("llama", "left")]
)
def test_padding_is_exact_without_a_dense_mask(model_type, kind):
    model, S = build(model_type), 23
    mask, ids = mask_with(kind, S), tokens(S=S)
    run, graphs = compiled(model)
    with torch.no_grad():
        ours = logits(run(ids, attention_mask=mask))
        switch(model, "eager")
        eager = logits(model(ids, attention_mask=mask))
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()], atol=1e-5, rtol=1e-4)
    assert len(graphs.calls) == 1
    assert graphs.square(S) == []


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_padded_prefill_of_a_static_cache_has_no_dense_mask(model_type):
    model, S = build(model_type), 23
    mask, ids = mask_with("holes", S), tokens(S=S)
    run, graphs = compiled(model)
    found = {}
    with torch.no_grad():
        for name, forward in (("fa_ops", run), ("eager", model)):
            cache = StaticCache(config=model.config, max_cache_len=40)
            switch(model, name)
            found[name] = logits(forward(ids, attention_mask=mask, past_key_values=cache))
    kept = mask.bool()
    torch.testing.assert_close(found["fa_ops"][kept], found["eager"][kept], atol=1e-5, rtol=1e-4)
    assert graphs.square(S, 40) == graphs.square(S) == []


def test_padding_of_several_lengths_is_one_graph():
    model = build("mistral")
    run, graphs = compiled(model, dynamic=True)
    for S in (9, 12, 16):
        mask = padding(S=S)
        with torch.no_grad():
            ours, eager = (logits(f(tokens(S=S), attention_mask=mask)) for f in (run, model))
        torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()])
    assert len(graphs.calls) == 1


def test_a_padded_training_step_has_the_gradients_of_eager_attention():
    model, S = build("llama"), 23
    mask, ids = mask_with("right", S), tokens(S=S)
    labels = ids.masked_fill(mask == 0, -100)
    run, graphs = compiled(model)
    grads = []
    for forward in (run, model):
        model.zero_grad()
        forward(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        switch(model, "eager")
    torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-3)
    assert graphs.square(S) == []


def test_a_packed_training_step_has_no_dense_mask():
    model = build("gemma3_text")
    positions = torch.cat([torch.arange(n) for n in (5, 7)])[None]
    run, graphs = compiled(model)
    ours = run(tokens(1), position_ids=positions, use_cache=False).logits
    eager = model(tokens(1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(ours, eager)
    assert set(graphs.masks()) == {"key_ranges"}


def test_decoding_with_a_static_cache_passes_lengths():
    model, ids = build("llama"), tokens()
    run, graphs = compiled(model)
    cache, reference = (StaticCache(config=model.config, max_cache_len=32) for _ in range(2))
    with torch.no_grad():
        for filled in (cache, reference):
            model(ids, past_key_values=filled)
        for _ in range(3):
            ours = run(ids[:, :1], past_key_values=cache).logits
            torch.testing.assert_close(ours, model(ids[:, :1], past_key_values=reference).logits)
    assert len(graphs.calls) == 1
    assert set(graphs.masks()) == {"lengths"}


@pytest.mark.parametrize(
    "model_type, side", [("llama", None), ("llama", "right"), ("gemma3_text", None)]
)
def test_static_caches_of_several_sizes_make_no_more_graphs_than_sdpa(model_type, side):
    """Layers are compiled, masks are made outside of them, as by generate()."""
    counts, results = [], []
    for name in ("sdpa", "fa_ops"):
        model, found = build(model_type, num_hidden_layers=1 if model_type == "llama" else 2), []
        switch(model, name)
        torch._dynamo.reset()
        graphs = Graphs()
        for layer in model.model.layers:
            layer.self_attn.compile(backend=graphs, fullgraph=True)
        for size in (16, 20, 24):
            cache = StaticCache(config=model.config, max_cache_len=size)
            mask, ids = padding(side=side) if side else torch.ones_like(padding()), tokens()
            for _ in range(5):
                with torch.no_grad():
                    out = model(ids, attention_mask=mask, past_key_values=cache).logits
                found.append((len(graphs.calls), out))
                mask, ids = torch.cat([mask, torch.ones_like(mask[:, :1])], 1), ids[:, :1]
        counts.append([count for count, _ in found])
        results.append([out for _, out in found])
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
    assert all(ours <= sdpa for sdpa, ours in zip(*counts, strict=True)), counts


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_prompts_below_the_window_of_a_static_cache_make_no_more_graphs_than_sdpa(padded):
    """generate() makes caches that its last token fills, in layers with a window too."""
    counts, generated = [], []
    for name in ("sdpa", "fa_ops"):
        model, graphs = build("gemma3_text", sliding_window=32), Graphs()
        switch(model, name)
        torch._dynamo.reset()

        def backend(graph, inputs, graphs=graphs, **options):  # generate() copies other callables
            return graphs(graph, inputs)

        config = CompileConfig(fullgraph=True, backend=backend)
        config._compile_all_devices = True
        for length in (5, 9):
            ids = tokens(S=length)
            mask = torch.ones_like(ids)
            mask[0, : 2 * padded] = 0
            generated.append(
                model.generate(
                    ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False,
                    cache_implementation="static", compile_config=config,
                )
            )  # fmt: skip
            counts.append(len(graphs.calls))
    assert counts[0] > 0 and counts[2:] == counts[:2]
    assert all(map(torch.equal, generated[:2], generated[2:]))


def test_generate_with_a_compiled_forward_gives_the_same_tokens():
    model = build("llama")
    options = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, attention_mask=padding())
    eager = model.generate(tokens(), **options)
    model.forward, _ = compiled(model.forward, dynamic=True)
    assert torch.equal(model.generate(tokens(), **options), eager)


@pytest.mark.parametrize(
    "model_type, strict", [("llama", False), ("llama", True), ("gemma3_text", False)]
)
def test_exported_programs_are_exact_without_a_dense_mask(model_type, strict):
    """The program holds the operators, is exact for every mask, and holds no dense mask."""
    model, S = build(model_type), 23
    with torch.no_grad():
        options = {"use_cache": False, "attention_mask": mask_with("left", S)}
        program = torch.export.export(model, (tokens(S=S),), options, strict=strict)
        mask = options["attention_mask"] = mask_with("holes", S)
        ours = logits(program.module()(tokens(S=S, seed=1), **options))
        switch(model, "eager")
        eager = logits(model(tokens(S=S, seed=1), **options))
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()], atol=1e-5, rtol=1e-4)
    calls = [n for n in program.graph.nodes if "fa.attention" in str(n.target)]
    assert len(calls) == model.config.num_hidden_layers
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert not [v for v in values if is_materialised(v) and v.shape[-2:] == (S, S)]
