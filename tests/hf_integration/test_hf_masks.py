"""The mask function: masks are exact for everything that transformers composes, and compact."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, masking_utils
from transformers.models.llama import modeling_llama  # noqa: F401  (loads the architecture)

from hf_integration import encodings, key_ranges, mask_counts, masks

S = 17
POSITIONS = torch.cat([torch.arange(n) for n in (5, 7, 5)])[None].expand(3, -1).contiguous()
SEQUENCES = masking_utils.find_packed_sequence_indices(POSITIONS)


def blocks() -> torch.Tensor:
    ids = torch.full((3, S), -1)
    ids[:, 2:6], ids[:, 9:14], ids[1, 9:14] = 0, 1, 3
    return ids


def packed(function):
    remap = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if remap is not None:  # from 5.23 on
        return remap(function, POSITIONS, SEQUENCES)
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(SEQUENCES))


def blockwise(function, ids=None):
    overlay = masking_utils.blockwise_overlay(blocks() if ids is None else ids)
    return masking_utils.or_masks(function, overlay)


BASES = {
    "causal": masking_utils.causal_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "wide window": masking_utils.sliding_window_causal_mask_function(40),
    "window but one": masking_utils.sliding_window_causal_mask_function(S - 1),  # hides one key
    "chunked": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 3, 1])),
    "bidirectional": masking_utils.bidirectional_mask_function,
    "bidirectional window": masking_utils.sliding_window_bidirectional_mask_function(3),
    "bidirectional but one": masking_utils.sliding_window_bidirectional_mask_function(S - 2),
}
CAUSAL = ("causal", "window", "chunked")
FUNCTIONS = (
    BASES
    | {f"{name}, packed": packed(BASES[name]) for name in BASES}
    | {f"{name}, blocks": blockwise(BASES[name]) for name in CAUSAL}
    | {f"{name}, packed, blocks": blockwise(packed(BASES[name])) for name in CAUSAL}
)
LAYER = torch.nn.Module()
# q_length, kv_length, q_offset, kv_offset
GEOMETRIES = {
    "prefill": (S, S, 0, 0),
    "chunked prefill": (5, S, 12, 0),
    "decode": (1, S, 16, 0),
    "static prefill": (10, S, 0, 0),
    "static decode": (1, S, 9, 0),
    "static decode, one unused key": (1, S, S - 2, 0),
    "static decode, filled": (1, S, S - 1, 0),
    "static prefill, one unused key": (S - 1, S, 0, 0),
    "sliding cache": (2, 9, 15, 8),
}


def padding(kind: str) -> torch.Tensor | None:
    valid = torch.ones((3, S), dtype=torch.bool)
    if kind in ("left", "right"):
        valid[0, :3], valid[2, :9] = False, False
        valid = valid.flip(-1) if kind == "right" else valid
    elif kind == "equal left":
        valid[:, :3] = False
    elif kind == "holes":
        valid[1, 5] = False
    elif kind in ("unused end", "hidden last key"):  # of ten that are filled
        valid[:, 10 if kind == "unused end" else 9 :] = False
    elif kind == "empty row":
        valid[1] = False
    return None if kind == "none" else valid


def request(function, geometry, pad=None, **changes) -> dict:
    q_length, kv_length, q_offset, kv_offset = geometry
    fields = dict(
        batch_size=3, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
        kv_offset=kv_offset, mask_function=function, attention_mask=pad, use_vmap=False,
        device=torch.device("cpu"), dtype=torch.float32, config=LlamaConfig(),
    )  # fmt: skip
    return fields | changes


def flags(name: str) -> dict:
    """The flags that transformers passes with a mask function."""
    if "bidirectional" in name:
        return {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": "packed" not in name}
    return {"allow_is_causal_skip": "packed" not in name and "blocks" not in name}


def dense(mask: torch.Tensor, Sq: int, Sk: int) -> torch.Tensor:
    """The keys that attention keeps with a mask."""
    found = encodings.arguments(mask, LAYER)
    visible = Sk if found.visible_keys is None else found.visible_keys
    keep = found.keep(Sq, visible, mask.device)
    if found.attn_mask is not None and found.attn_mask.dtype.is_floating_point:
        keep = keep & (found.attn_mask == 0)
    return F.pad(keep, (0, Sk - visible)).expand(3, 1, Sq, Sk)


def expected(fields: dict) -> torch.Tensor:
    return masking_utils.sdpa_mask(**fields, allow_is_causal_skip=False)


def made(fields: dict) -> tuple[torch.Tensor, str]:
    """The mask and the name under which it was counted."""
    mask_counts.clear()
    mask = masks.fa_ops_mask(**fields)
    return mask, next(iter(mask_counts))


@pytest.mark.parametrize("on_device", [False, True], ids=["known offset", "offset on device"])
@pytest.mark.parametrize(
    "pad",
    ["none", "ones", "left", "equal left", "right", "unused end", "hidden last key", "empty row"],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_are_exact_and_compact(name, pad, on_device):
    for kind, geometry in GEOMETRIES.items():
        if "packed" in name and kind != "prefill":
            continue  # transformers packs only without a cache
        fields = request(FUNCTIONS[name], geometry, padding(pad))
        if on_device:
            fields["q_offset"] = torch.tensor(geometry[2])
        mask, counted = made(fields | flags(name))
        assert counted in ("full", "causal", "ranges", "lengths"), kind
        assert torch.equal(dense(mask, *geometry[:2]), expected(fields)), kind
        assert torch.equal(mask.clone() & True, expected(fields)), kind


@pytest.mark.parametrize("tracing", [False, True], ids=["read", "traced"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_padding_with_holes_is_exact_and_compact(name, tracing, monkeypatch):
    """While tracing, masks are not read, and may therefore have holes."""
    pads = ("holes", "left", "ones", "empty row") if tracing else ("holes",)
    if tracing:
        monkeypatch.setattr(masks, "is_readable", lambda x: False)
    for kind, pad in itertools.product(GEOMETRIES, pads):
        if (tracing and "decode" in kind) or ("packed" in name and kind != "prefill"):
            continue
        fields = request(FUNCTIONS[name], GEOMETRIES[kind], padding(pad))
        mask, counted = made(fields | flags(name))
        if tracing and "blocks" in name:
            assert counted == "dense: packing while tracing"
            continue
        hole = tracing or kind != "sliding cache"  # whose keys are all behind the hole
        assert counted.endswith("keys") == hole, kind
        assert torch.equal(dense(mask, *GEOMETRIES[kind][:2]), expected(fields)), kind
        assert torch.equal(mask & True, expected(fields)), kind


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "blocks" not in name])
def test_search_gives_the_exact_ranges(name):
    for kind, (q_length, kv_length, q_offset, kv_offset) in GEOMETRIES.items():
        if "packed" in name and kind != "prefill":
            continue
        at = key_ranges.Queries(
            torch.arange(3)[:, None], torch.arange(q_length)[None] + q_offset, []
        )
        found = key_ranges.search(FUNCTIONS[name], at, kv_offset, kv_length)
        j = torch.arange(kv_length) + kv_offset
        keep = (j >= found.lo[..., None]) & (j < found.hi[..., None])
        fields = request(FUNCTIONS[name], (q_length, kv_length, q_offset, kv_offset))
        assert torch.equal(keep[:, None].expand(3, -1, -1, -1), expected(fields)), kind


@pytest.mark.parametrize(
    "name, kind, form",
    [
        ("causal", "prefill", "causal"),
        ("causal", "chunked prefill", "causal"),
        ("causal", "static prefill", "causal"),
        ("causal", "decode", "full"),
        ("wide window", "prefill", "causal"),
        ("wide window", "decode", "full"),
        ("window but one", "decode", "ranges"),
        ("window but one", "static prefill, one unused key", "causal"),
        ("causal", "static decode, one unused key", "lengths"),
        ("window", "sliding cache", "ranges"),
        ("bidirectional", "prefill", "full"),
    ],
)
def test_the_cheapest_encoding_is_chosen(name, kind, form):
    for pad in ("none", "ones"):
        fields = request(FUNCTIONS[name], GEOMETRIES[kind], padding(pad))
        assert made(fields | flags(name))[1] == form


def test_masks_are_linear_in_the_sequence_length():
    for name in ("causal", "window", "chunked", "bidirectional window"):
        fields = request(BASES[name], (4096, 4096, 0, 0), torch.ones((3, 4096)).bool())
        fields["attention_mask"][0, :100] = False
        mask, _ = made(fields | flags(name))
        assert sum(tensor.nbytes for tensor in mask.tensors()) <= 3 * 4096 * 2 * 4


def test_decoding_reads_nothing_from_the_device():
    """Tensors on the meta device have no values, so any read raises."""
    for offset in (16, torch.empty((), dtype=torch.int64, device="meta")):
        for name in ("causal", "window", "chunked"):
            for pad in (None, torch.empty((3, S), dtype=torch.bool, device="meta")):
                fields = request(BASES[name], GEOMETRIES["decode"], pad, device="meta")
                if name == "chunked":
                    start = torch.empty(3, dtype=torch.int64, device="meta")
                    chunked = masking_utils.chunked_causal_mask_function(4, start)
                    fields["mask_function"] = chunked
                mask, counted = made(fields | {"q_offset": offset})
                held = mask.tensors() if hasattr(mask, "tensors") else (mask,)
                assert sum(tensor.numel() for tensor in held) <= 3 * (S + 2)
                assert ("keys" in counted or "dense" in counted) == (pad is not None)


def test_lengths_are_contiguous():
    offset = torch.tensor(9)
    fields = request(BASES["causal"], GEOMETRIES["static decode"], q_offset=offset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "reads_are_free", lambda device: False)
        mask, counted = made(fields)
    assert counted == "lengths"
    lens = encodings.arguments(mask).kv_lens
    assert lens.tolist() == [10, 10, 10] and lens.is_contiguous()


def test_a_prefill_reads_the_device_once(monkeypatch):
    reads = []
    for method in ("tolist", "item", "__bool__", "__int__"):
        original = getattr(torch.Tensor, method)

        def counting(self, *args, original=original):
            reads.append(original)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, method, counting)
    fields = request(FUNCTIONS["window, blocks"], GEOMETRIES["prefill"], padding("left"))
    _, counted = made(fields | flags("window, blocks"))
    assert counted == "ranges"
    assert len(reads) == 1


def custom(batch, head, q, k):
    return (q + k) % 2 == 0


@pytest.mark.parametrize(
    "reason, changes",
    [
        ("mask function custom", {"mask_function": custom}),
        ("a mask function of the model itself", {"use_vmap": True}),
        ("an unknown architecture", {"config": None}),
        ("unknown keywords", {"a_later_release": 1}),
        (
            "blocks that are not contiguous",
            {
                "mask_function": blockwise(
                    BASES["causal"], torch.tensor([0, 0, -1, 0] + [-1] * 13).expand(3, -1)
                )
            },
        ),
        ("a padding mask of another batch size", {"attention_mask": torch.ones(2, S).bool()}),
    ],
)
def test_unknown_requests_get_a_dense_mask(reason, changes, monkeypatch):
    fields = request(BASES["causal"], GEOMETRIES["prefill"]) | changes
    if reason.startswith("a padding mask"):  # transformers itself does not support it
        with pytest.raises(IndexError):
            made(fields)
        assert mask_counts == {f"dense: {reason}": 1}
        return
    mask, counted = made(fields)
    assert counted == f"dense: {reason}"
    assert mask.dtype == torch.bool and mask.shape == (3, 1, S, S)
    fields |= {"allow_is_causal_skip": False}
    assert torch.equal(mask, masking_utils.sdpa_mask(**fields))


@pytest.mark.parametrize("shape", [(3, S, S), (S,)])
def test_masks_that_are_neither_padding_nor_dense_raise(shape):
    fields = request(BASES["causal"], GEOMETRIES["prefill"], torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, keys\) or .*, got"):
        made(fields)


def test_cross_attention_ignores_the_length_of_another_cache():
    valid = torch.ones((3, S), dtype=torch.bool)
    fields = request(BASES["bidirectional"], (1, 4, 3, 0), valid, allow_is_bidirectional_skip=True)
    assert made(fields)[1] == "full"
    valid[0, 12:] = False
    mask, _ = made(fields)
    assert mask.ranges[:, 0, 0, 1].tolist() == [12, S, S]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8])
@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (1, 1, 4, 2), (1, 1, 4, 1), (1, 1, 0, 0)])
def test_integer_masks_raise(dtype, shape):
    """As in SDPA; none of them is read as lengths or key ranges."""
    with pytest.raises(ValueError, match="attention_mask must be bool or floating point, got"):
        encodings.arguments(torch.zeros(shape, dtype=dtype))


def test_a_mask_of_one_query_is_bounded_to_its_kept_keys():
    """As in decoding with padding on a GPU; holes stay masked."""
    keep = torch.zeros(4, 1, 1, 10, dtype=torch.bool)
    keep[0, ..., 2:7] = True
    keep[1, ..., :] = True
    keep[2, ..., [1, 4]] = True
    form = encodings.bounded(keep, torch.float32, LAYER)
    assert form.key_ranges[:, 0, 0].tolist() == [[2, 7], [0, 10], [1, 5], [0, 0]]
    assert torch.equal(form.attn_mask == 0, keep)
    assert encodings.bounded(keep, torch.float32, LAYER).key_ranges is form.key_ranges
    assert encodings.bounded(keep.clone(), torch.float32, LAYER).key_ranges is not form.key_ranges
    assert encodings.bounded(keep, torch.bfloat16, LAYER).attn_mask.dtype == torch.bfloat16
    keep[0, ..., 8] = True
    assert encodings.bounded(keep, torch.bfloat16, LAYER).key_ranges[0, 0, 0].tolist() == [2, 9]


def test_decoding_with_a_bounded_mask_gives_that_of_the_mask(monkeypatch):
    from hf_integration import fa_ops_attention_forward

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 1, 16, generator=generator)
    k, v = (torch.randn(2, 2, 10, 16, generator=generator) for _ in range(2))
    keep = torch.rand(2, 1, 1, 10, generator=generator) > 0.5
    keep[..., 8:] = False
    expected, _ = fa_ops_attention_forward(torch.nn.Module(), q, k, v, keep)
    form = encodings.bounded(keep, torch.float32, LAYER)
    monkeypatch.setattr(encodings, "arguments", lambda mask, layer: form)
    k[:, :, 8:] = v[:, :, 8:] = float("nan")  # the unused end of a cache
    ours, _ = fa_ops_attention_forward(torch.nn.Module(), q, k, v, keep)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("start", range(2))
def test_every_padding_mask_has_the_right_key_range(start):
    """All masks of five keys, of which the cache may have dropped the first."""
    valid = torch.tensor([[bool(n >> j & 1) for j in range(5)] for n in range(32)])
    fields = {"batch_size": 32, "q_length": 1, "kv_length": 5 - start, "kv_offset": start}
    padding, is_range = masks._padding_ranges(masks.Request(**fields, attention_mask=valid), False)
    assert not is_range
    for row, lo, hi in zip(valid[:, start:], padding.lo, padding.hi, strict=True):
        single = masks.Request(**fields | {"batch_size": 1}, attention_mask=valid[:1])
        kept = row.nonzero()[:, 0].tolist()
        whole = torch.cat([torch.zeros(start).bool(), row])[None]
        _, is_range = masks._padding_ranges(single._replace(attention_mask=whole), False)
        contiguous = kept == list(range(kept[0], kept[-1] + 1)) if kept else True
        assert bool(is_range) == contiguous
        if contiguous:
            assert list(range(int(lo), int(hi))) == kept


@pytest.mark.parametrize("kv_offset", [0, 3])
def test_the_newest_token_attends_all_filled_keys(kv_offset, monkeypatch):
    monkeypatch.setattr(masks, "reads_are_free", lambda device: False)
    fields = {"batch_size": 2, "q_length": 1, "kv_length": 8, "kv_offset": kv_offset}
    for offset in (5, 12):
        mask, counted = made(fields | {"q_offset": torch.tensor(offset), "config": LlamaConfig()})
        expected = min(offset + 1 - kv_offset, 8)
        assert counted == "lengths"
        assert mask.lengths.tolist() == [expected] * 2
        mask, counted = made(fields | {"q_offset": offset, "config": LlamaConfig()})
        assert counted == ("full" if expected == 8 else "lengths")
