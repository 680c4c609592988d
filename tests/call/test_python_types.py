"""Every argument of every public function refuses values of other types than its annotation's.

The values are chosen by annotation, so that a new argument is tested without being listed here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

import fa_ops
from fa_ops.compat import flash_attn_interface as three
from fa_ops.compat.flash_attn import bert_padding
from fa_ops.compat.flash_attn import flash_attn_interface as two
from fa_ops.compat.flash_attn.layers import rotary
from fa_ops.compat.flash_attn.ops.triton.rotary import apply_rotary

rand = torch.randn


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE = ints([0, 1], [2, 3])
PACKING = {"cu_seqlens_q": ints(0, 2, 6), "cu_seqlens_k": ints(0, 3, 8)}
LONGEST = {"max_seqlen_q": 4, "max_seqlen_k": 5}
WINDOW = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
SCORES = {"dropout_p": 0.0, "softmax_scale": 0.5, "causal": False} | WINDOW


def dense() -> dict:
    return {"query": rand(2, 4, 6, 8), "key": rand(2, 2, 7, 8), "value": rand(2, 2, 7, 8)}


def packed() -> dict:
    q, k, v = rand(6, 4, 8), rand(8, 2, 8), rand(8, 2, 8)
    return {"query": q, "key": k, "value": v, **PACKING}


def pages() -> dict:
    k, v = rand(5, 4, 2, 8), rand(5, 4, 2, 8)
    keys = {"key": k, "value": v, "cu_seqlens_k": None, "kv_lens": ints(3, 5)}
    return packed() | keys | {"page_table": TABLE}


def cache() -> dict:
    k, v, new = rand(2, 2, 8, 8), rand(2, 2, 8, 8), rand(2, 2, 1, 8)
    given = {"query": rand(2, 4, 1, 8), "key_cache": k, "value_cache": v, "kv_lens": ints(3, 5)}
    tables = {"rotary_cos": rand(16, 4), "rotary_sin": rand(16, 4)}
    return given | {"key": new, "value": new.clone()} | tables


def flash() -> dict:
    return {"q": rand(2, 6, 4, 8), "k": rand(2, 7, 2, 8), "v": rand(2, 7, 2, 8)}


def flash_packed() -> dict:
    q, k, v = rand(6, 4, 8), rand(8, 2, 8), rand(8, 2, 8)
    return {"q": q, "k": k, "v": v, **PACKING, **LONGEST}


def flash_pages() -> dict:
    k, v = rand(5, 4, 2, 8), rand(5, 4, 2, 8)
    return flash_packed() | {"k": k, "v": v, "block_table": TABLE}


def flash_cache() -> dict:
    k, v, new = rand(2, 8, 2, 8), rand(2, 8, 2, 8), rand(2, 1, 2, 8)
    given = {"q": rand(2, 1, 4, 8), "k_cache": k, "v_cache": v, "cache_seqlens": ints(3, 5)}
    tables = {"rotary_cos": rand(16, 4), "rotary_sin": rand(16, 4)}
    return given | {"k": new, "v": new.clone()} | tables


def flash_packed_cache() -> dict:
    k, v = rand(5, 4, 2, 8), rand(5, 4, 2, 8)
    given = {"q": rand(6, 4, 8), "k_cache": k, "v_cache": v, "cache_seqlens": ints(3, 5)}
    return given | {"page_table": TABLE, "cu_seqlens_q": PACKING["cu_seqlens_q"], "max_seqlen_q": 4}


def backward_of_2() -> dict:
    given = flash()
    out, lse, *_ = two._flash_attn_forward(**given, **SCORES, return_softmax=False)
    buffers = {f"d{name}": torch.empty_like(x) for name, x in given.items()}
    saved = {"dout": torch.ones_like(out), "out": out, "softmax_lse": lse, "deterministic": False}
    return given | buffers | saved | SCORES


def backward_of_3() -> dict:
    given = flash()
    out, lse, *_ = three._flash_attn_forward(**given)
    return given | {"dout": torch.ones_like(out), "out": out, "softmax_lse": lse}


def rotated(name: str, *shape: int) -> Callable[[], dict]:
    return lambda: {name: rand(2, 4, *shape), "cos": rand(8, 4), "sin": rand(8, 4)}


LENGTHS = torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0]])
CALLS = {
    "attention": (fa_ops.attention, dense),
    "attention_varlen": (fa_ops.attention_varlen, packed),
    "attention_varlen over pages": (fa_ops.attention_varlen, pages),
    "attention_with_kv_cache": (fa_ops.attention_with_kv_cache, cache),
    "quantized_attention": (fa_ops.quantized_attention, dense),
    "mask_blocks": (fa_ops.mask_blocks, lambda: {"attn_mask": rand(6, 7)}),
    "2, dense": (two.flash_attn_func, flash),
    "2, packed": (two.flash_attn_varlen_func, flash_packed),
    "2, pages": (two.flash_attn_varlen_func, flash_pages),
    "2, cache": (two.flash_attn_with_kvcache, flash_cache),
    "2, forward": (
        two._flash_attn_forward, lambda: flash() | SCORES | {"return_softmax": False}
    ),
    "2, packed forward": (two._flash_attn_varlen_forward, lambda: flash_packed() | SCORES),
    "2, backward": (two._flash_attn_backward, backward_of_2),
    "3, dense": (three.flash_attn_func, flash),
    "3, qv": (three.flash_attn_func, lambda: flash() | {"qv": rand(2, 6, 4, 8)}),
    "3, one tensor": (three.flash_attn_qkvpacked_func, lambda: {"qkv": rand(2, 6, 3, 2, 8)}),
    "3, packed": (three.flash_attn_varlen_func, flash_packed),
    "3, cache": (three.flash_attn_with_kvcache, flash_cache),
    "3, packed cache": (three.flash_attn_with_kvcache, flash_packed_cache),
    "3, forward": (three._flash_attn_forward, flash),
    "3, backward": (three._flash_attn_backward, backward_of_3),
    "3, combine": (
        three.flash_attn_combine,
        lambda: {"out_partial": rand(2, 1, 3, 4, 8), "lse_partial": rand(2, 1, 3, 4)},
    ),
    "unpad_input": (
        bert_padding.unpad_input,
        lambda: {"hidden_states": rand(2, 4, 8), "attention_mask": LENGTHS.clamp(max=1)},
    ),
    "unpad_input of sequences": (
        bert_padding.unpad_input_for_concatenated_sequences,
        lambda: {"hidden_states": rand(2, 4, 8), "attention_mask_in_length": LENGTHS},
    ),
    "pad_input": (
        bert_padding.pad_input,
        lambda: {
            "hidden_states": rand(5, 8), "indices": torch.arange(5), "batch": 2, "seqlen": 4
        },
    ),
    "apply_rotary": (apply_rotary, rotated("x", 3, 8)),
    "apply_rotary_emb": (rotary.apply_rotary_emb, rotated("x", 3, 8)),
    "apply_rotary_emb_qkv_": (rotary.apply_rotary_emb_qkv_, rotated("qkv", 3, 2, 8)),
    "apply_rotary_emb_kv_": (rotary.apply_rotary_emb_kv_, rotated("kv", 2, 2, 8)),
    "RotaryEmbedding": (rotary.RotaryEmbedding, lambda: {"dim": 8}),
}  # fmt: skip

WRONG = {
    "bool": ["a", "", 2, 1.5, None, torch.ones(3), np.ones(3), object()],
    "float": ["a", "", 1j, None, torch.ones(3), np.ones(3)],
    "int": ["a", "", 1.5, None, torch.ones(3), np.ones(3)],
    "Tensor": ["a", 1.5, [1], np.ones(3)],
    "str": ["a", "", np.ones(3), torch.ones(3)],
    "torch.dtype": ["a", 1.5, None],
    "Window": [3, "ab", (1,), (1, 2, 3), ("a", 0), (1.5, 0), (0, torch.ones(3))],
}
# A bool is a number for flash-attn, and so is False for SDPA's probability of dropout.
BOOLS = {"int": [False, True], "float": [False, True], "Window": [(False, 1), (1, True)]}
# Other words of the errors of functions that hand an argument on.
ALSO = {
    "q": "query",
    "k": "key",
    "v": "value",
    "k_cache": "key_cache",
    "v_cache": "value_cache",
    "block_table": "k must have shape (pages",
    "cu_seqlens_q": "must have shape (T",
    "cu_seqlens_k": "must have shape (T",
    "k_new": "k and v",
    "v_new": "k and v",
    "seqused_k": "cache_seqlens",
    "kv_batch_idx": "cache_batch_idx",
    "leftpad_k": "cache_leftpad",
    "window_size_left": "a side of window_size",
    "window_size_right": "a side of window_size",
}
IGNORED = {
    ("2, packed forward", "zero_tensors"),
    # of rows of equal length
    ("3, forward", "max_seqlen_q"),
    ("3, forward", "max_seqlen_k"),
    ("3, forward", "seqlens_rotary"),
    ("3, forward", "rotary_interleaved"),
    ("3, forward", "scheduler_metadata"),
    ("3, backward", "max_seqlen_q"),
    ("3, backward", "max_seqlen_k"),
}


def wrong_values(function: Callable, parameter: inspect.Parameter) -> list:
    """Values of no type that the annotation names."""
    kinds = {kind.strip() for kind in str(parameter.annotation).split("|")}
    kinds = {"int" if kind == "Offsets" else kind for kind in kinds}
    known = [kind for kind in WRONG if kind in kinds and "torch.device" not in kinds]
    values = WRONG[known[0]] if known else []
    if known and ".compat." not in function.__module__ and parameter.name != "dropout_p":
        values = values + BOOLS.get(known[0], [])
    if "int" in kinds and "Tensor" in kinds:
        values = ["a", 1.5, [1]]
    may_be_none = "None" in kinds or "max_seqlen" in parameter.name or (
        parameter.name in ("softmax_scale", "alibi_slopes", "window_size_left", "window_size_right")
    )  # fmt: skip
    return [value for value in values if value is not None or not may_be_none]


@pytest.mark.parametrize("call", CALLS)
def test_other_types_are_refused_by_name(call):
    function, arguments = CALLS[call]
    function(**arguments())
    for name, parameter in inspect.signature(function).parameters.items():
        for value in wrong_values(function, parameter) if (call, name) not in IGNORED else ():
            with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
                function(**arguments() | {name: value})
            text = str(error.value)
            assert name in text or ALSO.get(name, name) in text, f"{name}={value!r}: {text}"


@pytest.mark.parametrize("name", ["query", "value", "sinks", "kv_lens"])
def test_layouts_without_strides_are_refused_by_name(name):
    q = torch.randn(2, 4, 9, 8)
    lens = torch.tensor([3, 0], dtype=torch.int32)
    tensors = {"query": q, "key": q, "value": q, "sinks": torch.ones(4), "kv_lens": lens}
    sparse = tensors | {name: tensors[name].to_sparse()}
    with pytest.raises(TypeError, match=f"{name} must be a strided Tensor, got .*sparse_coo"):
        fa_ops.attention(**sparse)


@pytest.mark.parametrize("zero", [False, np.bool_(False), torch.tensor(False)])
def test_flash_attn_takes_bools_for_numbers_and_sdpa_false_for_no_dropout(zero):
    wanted = two.flash_attn_func(**flash(), window_size=(1, 0)).shape
    options = {"dropout_p": zero, "window_size": (True, zero), "softcap": zero}
    assert two.flash_attn_func(**flash(), **options).shape == wanted
    assert fa_ops.attention(**dense(), dropout_p=False).shape == (2, 4, 6, 8)
    assert fa_ops.attention_varlen(**pages(), dropout_p=False).shape == (6, 4, 8)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "sinks"])
def test_nested_tensors_of_strided_layout_are_refused_by_name(name):
    """In repeated calls too, where comparing their strides would abort the process."""
    q = torch.randn(2, 4, 9, 8)
    given = {"query": q, "key": q.clone(), "value": q.clone(), "sinks": torch.randn(4)}
    given["attn_mask"] = torch.ones(2, 4, 9, 9, dtype=torch.bool)
    nested = given | {name: torch.nested.nested_tensor(list(given[name]), layout=torch.strided)}
    for _ in range(3):
        fa_ops.attention(**given)
        with pytest.raises(TypeError, match=f"{name} must be a Tensor, or a nested one with"):
            fa_ops.attention(**nested)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_numbers(kind):
    given = dense()
    wanted = fa_ops.attention(**given, scale=1.0, softcap=2.0)
    options = {"scale": kind(1), "softcap": kind(2), "dropout_p": kind(0)}
    assert torch.equal(fa_ops.attention(**given, **options), wanted)
    results = []
    for p in (kind(0.5), float(kind(0.5))):  # np.int64(0.5) is 0
        torch.manual_seed(0)
        results.append(fa_ops.attention(**given, dropout_p=p))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "call, name, remedy",
    [
        ("attention", "causal", ": did you mean is_causal?"),
        ("attention", "softmax_scale", ": did you mean scale?"),
        ("attention", "window_size", ": did you mean window?"),
        (
            "attention", "return_attn_probs",
            ": did you mean return_lse? It returns lse; weights are never stored",
        ),
        ("attention", "is_casual", ": did you mean is_causal?"),
        ("attention", "colour", ""),
        ("attention_varlen", "cu_seqlens_kv", ": did you mean cu_seqlens_k?"),
        ("attention_varlen", "enable_gqa", ": leave it out, as heads may always form groups"),
        ("attention_with_kv_cache", "cache_seqlens", ": did you mean kv_lens?"),
        ("quantized_attention", "causal", ": did you mean is_causal?"),
        ("quantized_attention", "block_table", ""),
    ],
)  # fmt: skip
def test_names_of_other_libraries_are_refused_with_the_name_here(call, name, remedy):
    function, arguments = CALLS[call]
    arguments = arguments() | {name: True}
    expected = f"{call}() got an unexpected keyword argument {name!r}{remedy}"
    with pytest.raises(TypeError) as error:
        function(**arguments)
    assert str(error.value) == expected
    if call.startswith("attention") and "key_cache" not in arguments:
        tensors = [arguments.pop(n) for n in ("query", "key", "value")]
        with pytest.raises(TypeError) as error:
            fa_ops.explain(*tensors, **arguments)
        assert str(error.value) == expected


@pytest.mark.parametrize(
    "function, name, meant",
    [
        (fa_ops.flex_attention, "causal", "is_causal"),
        (fa_ops.attention_selected, "softmax_scale", "scale"),
        (fa_ops.attention_selected_tokens, "indices", "token_indices"),
    ],
)
def test_so_are_those_of_attention_by_functions_and_lists(function, name, meant):
    expected = f"got an unexpected keyword argument '{name}': did you mean {meant}?"
    given = [torch.ones(1, 1, 1, 1)] * (3 if function is fa_ops.flex_attention else 4)
    with pytest.raises(TypeError, match=re.escape(expected)):
        function(*given, **{name: True})
    if function is fa_ops.flex_attention:
        score_mod = lambda score, b, h, i, j: score  # noqa: E731
        with pytest.raises(TypeError, match=re.escape(expected)):
            fa_ops.explain(*given, score_mod=score_mod, return_lse=True, **{name: True})


def test_enable_gqa_of_sdpa_is_accepted():
    given = dense()
    assert torch.equal(fa_ops.attention(**given, enable_gqa=True), fa_ops.attention(**given))
