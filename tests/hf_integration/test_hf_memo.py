"""Values that the layers of a forward pass share."""

import torch
from tiny_models import build, padding, tokens

from hf_integration import encodings
from hf_integration.encodings import PerTensorCache

FIRST, SECOND = torch.nn.Module(), torch.nn.Module()


def test_layers_share_a_value_until_the_tensor_changes():
    made, known = [], PerTensorCache()

    def of(tensor, layer):
        return known.get(tensor, layer, lambda: made.append(tensor.tolist()) or len(made))

    x = torch.zeros(2)
    assert [of(x, layer) for layer in (FIRST, SECOND, FIRST)] == [1, 1, 1]
    x += 1
    assert [of(x, layer) for layer in (SECOND, FIRST)] == [2, 2]
    other = x.clone()
    assert [of(other, FIRST), of(x, SECOND), of(other, SECOND)] == [3, 2, 3]
    assert made == [[0, 0], [1, 1], [1, 1]]
    for _ in range(PerTensorCache.MAX_ENTRIES):
        of(torch.ones(1), FIRST)
    assert of(x, FIRST) == 4 + PerTensorCache.MAX_ENTRIES


def test_values_of_inference_tensors_are_computed_once_in_a_forward_pass():
    """These tensors do not count in-place changes."""
    made, known = [], PerTensorCache()
    with torch.inference_mode():
        x = torch.zeros(1)
        for value in (3, 4):
            x.fill_(value)
            for layer in (FIRST, SECOND):
                known.get(x, layer, lambda: made.append(x.item()))
    assert made == [3, 4]


def test_a_captured_graph_computes_its_own_value_once(monkeypatch):
    made, capturing, x = [], [False], torch.zeros(1)
    version = encodings._version
    monkeypatch.setattr(
        encodings, "_version", lambda t: "capturing" if capturing[0] else version(t)
    )
    known = encodings.PerTensorCache()
    for capturing[0] in (False, True, True, False):
        for layer in (FIRST, SECOND):
            known.get(x, layer, lambda: made.append(capturing[0]))
    assert made == [False, True, True, False]


def test_inference_mode_gives_the_same_tokens():
    """One row, whose positions are read, and several padded rows, with each cache."""
    model = build("llama")
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    for ids, mask in ((tokens(1), None), (tokens(), padding())):
        for cache in (None, "static"):
            call = options | {"attention_mask": mask, "cache_implementation": cache}
            with torch.inference_mode():
                ours = model.generate(ids.clone(), **call)
            assert torch.equal(ours, model.generate(ids, **call))
