"""Indexers of transformers' sparse models, without a tensor of all their scores.

An indexer scores every key for every query and returns the best keys, or blocks of keys. Its code
computes (B, S, heads, S) scores with torch. While it runs under our name, the product of its
queries and keys is recorded instead, and so is what it does with the result, up to the step that
keeps the best: that step alone is computed, in tiles of keys. Whatever else the code does with the
scores computes them as the model would.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fa_ops
from fa_ops.tracing import is_compiling
from hf_integration import encodings
from hf_integration.encodings import Encoding, MaskRows

PART = {"cpu": 2**21, "cuda": 2**27}  # scores of blocks that are computed at a time
# the method with which a model makes a dense mask of its lists
_MASK_METHOD = "build_attention_mask_from_topk"
_MASK_PARAMETERS = ["self", "topk_indices", "query_states", "kv_length"]
_PASSES_LISTS = re.compile(r"\b(block_)?indices=")  # to the attention function


def install(module: ModuleType, is_ours: Callable[[object], bool]) -> bool:
    """Make the indexers of a modeling module list keys without storing scores. Idempotent.

    `is_ours(config)` is whether our attention function will be called. Indexers whose lists the
    module does not pass to the attention function are left alone, as its code makes masks of them.
    A method that makes a dense mask of lists is replaced, so that the mask holds the lists. Returns
    whether there is something to patch.
    """
    classes = [
        value for name, value in vars(module).items()
        if name.endswith("Indexer") and inspect.isclass(value) and "forward" in vars(value)
    ]  # fmt: skip
    is_found = False
    for value in classes if passes_lists(module) else ():
        value.forward, is_found = _wrapped(value.forward, _listing, is_ours), True
    for value in list(vars(module).values()):
        masks = vars(value).get(_MASK_METHOD) if inspect.isclass(value) else None
        if masks is not None and list(inspect.signature(masks).parameters) == _MASK_PARAMETERS:
            setattr(value, _MASK_METHOD, _wrapped(masks, _compact_mask, is_ours))
            is_found = True
    return is_found


def _wrapped(original: Callable, wrapper: Callable, is_ours: Callable[[object], bool]) -> Callable:
    if hasattr(original, "_fa_ops_original"):
        return original
    wrapped = functools.wraps(original)(wrapper(original, is_ours))
    wrapped._fa_ops_original = original
    return wrapped


def _compact_mask(original: Callable, is_ours: Callable[[object], bool]) -> Callable:
    """The method that makes a mask of lists (B, S, n), by a mask that holds the lists."""

    def masks(self, topk_indices, query_states, kv_length):
        if is_compiling() or not is_ours(getattr(self, "config", None)):
            return original(self, topk_indices, query_states, kv_length)
        B, _, S, _ = query_states.shape
        return encodings.listed((B, 1, S, kv_length), topk_indices)

    return masks


@functools.cache
def passes_lists(module: ModuleType) -> bool:
    """Whether attention of a modeling module passes an indexer's lists to our function."""
    try:
        return _PASSES_LISTS.search(inspect.getsource(module)) is not None
    except OSError:
        return False


def indexer_note(layer: nn.Module, module: ModuleType) -> str | None:
    """What `explain` says of the keys that a layer selects; None if it selects none."""
    is_sparse = getattr(layer, "indexer", None) is not None or getattr(layer, "skip_topk", False)
    if is_sparse and passes_lists(module):
        note = "keys by an indexer's lists, in memory linear in them unless its indexer is compiled"
        is_dense = any(p.is_cuda for p in layer.parameters())
        is_dense = is_dense and not hasattr(getattr(layer, "indexer", None), "block_size")
        return note + ("; with gradients by a dense mask" if is_dense else "")
    if is_sparse and hasattr(getattr(layer, _MASK_METHOD, None), "_fa_ops_original"):
        return "keys by an indexer's lists, in memory linear in them; its indexer stores all scores"
    names = {name for name in vars(module) if name.endswith("Indexer")}
    if is_sparse or not names.isdisjoint(type(part).__name__ for part in layer.modules()):
        return "its indexer stores all scores, and the model makes a dense mask of its lists"
    return None


def _listing(original: Callable, is_ours: Callable[[object], bool]) -> Callable:
    def forward(self, *args, **kwargs):
        if is_compiling() or not is_ours(getattr(self, "config", None)):
            return original(self, *args, **kwargs)
        with RecordedScores():
            return original(self, *args, **kwargs)

    return forward


class RecordedScores(TorchFunctionMode):
    """While it is active, products of (B, X, Y, D) and (B, 1, D, T) are recorded, not computed."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(x, _Recorded) for x in (*args, *kwargs.values())):
            return _apply(function, args, kwargs)
        name = getattr(function, "__name__", "")
        if name in ("matmul", "__matmul__") and not kwargs and _are_queries_and_keys(*args):
            q, k = args
            return IndexScores(q, k.squeeze(1).transpose(1, 2))
        if name in ("gt", "__gt__") and not kwargs and _are_positions(*args):
            return _LaterKeys(*args)
        if name in ("bitwise_not", "__invert__") and type(args[0]) is MaskRows:
            return _HiddenKeys(args[0])
        return function(*args, **kwargs)


def _are_queries_and_keys(q: object, k: object) -> bool:
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4):
        return False
    return k.shape[1] == 1 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[2]


def _are_positions(keys: object, queries: object) -> bool:
    """Whether they are positions (1, 1, 1, T) and (B, 1, S, 1)."""
    if not (isinstance(keys, Tensor) and isinstance(queries, Tensor)):
        return False
    if keys.dim() != 4 or queries.dim() != 4 or keys.shape[3] == 1:
        return False
    return tuple(keys.shape[:3]) == (1, 1, 1) and tuple(queries.shape[1::2]) == (1, 1)


class _Recorded:
    """What stands for a tensor that is not computed; `dense` computes it."""

    shape: torch.Size
    dtype = torch.bool

    def dense(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _apply(function, args, kwargs or {})

    def __getattr__(self, name: str):
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        found = getattr(Tensor, name)
        if not callable(found):  # a property
            return getattr(self.dense(), name)
        return functools.partial(_method, found, self)


def _operation(name: str) -> Callable:
    function = getattr(Tensor, name)
    return lambda self, *args: _apply(function, (self, *args), {})


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "invert", "and", "or", "getitem",
    "setitem", "lt", "le", "gt", "ge", "matmul", "rmatmul",
):  # fmt: skip
    setattr(_Recorded, f"__{_name}__", _operation(f"__{_name}__"))


def _method(function: Callable, *args, **kwargs) -> object:
    return _apply(function, args, kwargs)


class _HiddenKeys(_Recorded):
    """The inverse of the mask of an indexer."""

    def __init__(self, rows: MaskRows) -> None:
        self.rows, self.shape = rows, rows.shape

    def dense(self) -> Tensor:
        return ~encodings.materialise_rows(self.rows)


class _LaterKeys(_Recorded):
    """Where the position of a key, (1, 1, 1, T), is above that of a query, (B, 1, S, 1)."""

    def __init__(self, keys: Tensor, queries: Tensor) -> None:
        self.keys, self.queries = keys, queries
        self.shape = torch.broadcast_shapes(keys.shape, queries.shape)

    def dense(self) -> Tensor:
        return self.keys.greater(self.queries)


class IndexScores(_Recorded):
    """The scores of an indexer, (B, X, Y, T), and what its code has done with them so far.

    A lightning indexer has X queries of Y heads: its scores are scaled, rectified, summed over
    heads with weights, and masked, before the best keys are kept. An indexer of blocks has X heads
    of Y queries, and keeps the blocks with the largest score of a key.
    """

    dtype = torch.float32

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k, self.steps = q, k, ()  # (B, X, Y, D), (B, T, D)
        self.computed: Tensor | None = None  # once something has read or written them
        self.shape = torch.Size((*q.shape[:3], k.shape[1]))

    def then(self, shape: tuple[int, ...], name: str, function: Callable, *args, **options):
        """The scores after one more step."""
        found = IndexScores(self.q, self.k)
        found.shape = torch.Size(shape)
        found.steps = (*self.steps, (name, function, args, options))
        return found

    def names(self) -> list[str]:
        """The steps so far."""
        return [name for name, *_ in self.steps]

    def arguments(self, name: str) -> tuple:
        """Those of a step behind the scores."""
        return next(args for step, _, args, _ in self.steps if step == name)

    def dense(self) -> Tensor:
        """The scores after all steps, as the model computes them."""
        if self.computed is not None:
            return self.computed
        with torch._C.DisableTorchFunction():
            scores = self.q @ self.k.transpose(1, 2).unsqueeze(1)
            for _, function, args, options in self.steps:
                args = [x.dense() if isinstance(x, _Recorded) else x for x in args]
                if function is torch.matmul:  # the weights are the first factor
                    scores = function(*args, scores)
                else:
                    scores = function(scores, *args, **options)
        self.computed = scores
        return scores


def _apply(function: Callable, args: tuple, kwargs: dict) -> object:
    """A function of recorded scores: one more step, the best keys, or what it is of tensors."""
    name = getattr(function, "__name__", "")
    scores = next((x for x in args if isinstance(x, IndexScores)), None)
    found = None
    if scores is not None and scores.computed is None:
        rest = tuple(x for x in args if x is not scores)
        found = _step(scores, name, function, rest, kwargs, args[0] is scores)
    if found is not None:
        return found
    args = [x.dense() if isinstance(x, _Recorded) else x for x in args]
    kwargs = {n: x.dense() if isinstance(x, _Recorded) else x for n, x in kwargs.items()}
    return function(*args, **kwargs)


def _step(
    scores: IndexScores, name: str, function: Callable, rest: tuple, kwargs: dict, is_first: bool
) -> object:
    """The scores after a step that can be recorded, or its result; None for other steps."""
    done, shape = scores.names(), tuple(scores.shape)
    is_plain = is_first and not kwargs
    match name:
        case "mul" | "__mul__" if not done and is_plain and _is_positive(rest[0]):
            return scores.then(shape, "scale", torch.mul, *rest)
        case "float" if is_plain and not rest:
            return scores
        case "relu" if is_first and done in ([], ["scale"]) and not kwargs.get("inplace"):
            return scores.then(shape, "relu", torch.relu)
        case "matmul" if not is_first and not kwargs and done[-1:] == ["relu"]:
            B, S, H, T = shape
            if tuple(rest[0].shape) == (B, S, 1, H):
                return scores.then((B, S, 1, T), "sum", torch.matmul, *rest)
        case "squeeze" if done[-1:] == ["sum"] and is_plain and rest == (-2,):
            return scores.then((*shape[:2], shape[3]), "squeeze", torch.squeeze, *rest)
        case "masked_fill" if is_plain and rest[1] == -math.inf:
            if done[-1:] == ["squeeze"] and rest[0].shape == scores.shape:
                return scores.then(shape, "mask", torch.masked_fill, *rest)
            if not done and isinstance(rest[0], _LaterKeys):
                return scores.then(shape, "later", torch.masked_fill, *rest)
        case "topk" if done[-1:] == ["mask"] and is_first and len(rest) == 1:
            if kwargs in ({}, {"dim": -1}):
                return _best_keys(scores, rest[0])
        case "pad" if done == ["later"] and is_first:
            pad, *others = rest or (kwargs.get("pad"),)
            if len(pad) == 2 and pad[0] == 0 and kwargs.get("value", *others) == -math.inf:
                options = {"value": -math.inf}
                return scores.then((*shape[:3], shape[3] + pad[1]), "pad", F.pad, pad, **options)
        case "view" if done[:1] == ["later"] and is_plain and len(rest) == 5:
            if rest[:3] == shape[:3] and rest[3] * rest[4] == shape[3]:
                return scores.then(rest, "blocks", torch.reshape, rest)
        case "amax" if done[-1:] == ["blocks"] and is_first and not rest and kwargs == {"dim": -1}:
            return _block_scores(scores)
    return None


def _is_positive(scale: object) -> bool:
    return isinstance(scale, float | int) and 0 < scale < math.inf


def _best_keys(scores: IndexScores, count: int) -> SimpleNamespace | None:
    """`indices` (B, S, count) of the keys with the largest scores, -1 behind the last one.

    None for masks that `select_tokens` does not have.
    """
    given = next(x for x in scores.arguments("mask") if not isinstance(x, float))
    q, k, weights = scores.q, scores.k, scores.arguments("sum")[0]
    options = {"is_causal": False}
    if isinstance(given, _HiddenKeys):
        mask = given.rows.mask
        if mask.shape[3] != k.shape[1]:
            return None
        found = encodings.arguments(mask)
        kept = found.attn_mask
        if mask.encoding is Encoding.RANGES_KEYS:  # whose mask is one to add
            kept = mask.kept[:, None, None]
        if found.visible_keys is not None:
            k = k[:, : found.visible_keys]
        options = {
            "is_causal": found.is_causal, "key_ranges": found.key_ranges, "attn_mask": kept,
            "kv_lens": found.kv_lens,
        }  # fmt: skip
    elif isinstance(given, Tensor):
        options["attn_mask"] = ~given.unsqueeze(1)
    else:
        return None
    scale = scores.arguments("scale")[0] if "scale" in scores.names() else 1.0
    lists = fa_ops.select_tokens(
        q.transpose(1, 2), k.unsqueeze(1), weights.squeeze(2).transpose(1, 2), count,
        scale=float(scale), **options,
    )  # fmt: skip
    return SimpleNamespace(indices=lists[:, 0])


@torch.no_grad()
def _block_scores(scores: IndexScores) -> Tensor:
    """The largest score of a key of each block, (B, H, S, blocks), -inf where all are later."""
    (q, k), (later, _) = (scores.q, scores.k), scores.arguments("later")
    (B, H, S, _), T, (blocks, size) = q.shape, k.shape[1], scores.shape[3:]
    found = torch.full((B, H, S, blocks), -math.inf, dtype=q.dtype, device=q.device)
    limit = max(1, PART.get(q.device.type, PART["cuda"]) // (B * H))
    tile = size * max(1, min(blocks, 2048 // size))
    queries = max(1, limit // tile)
    positions = later.keys.view(-1)
    for i in range(0, S, queries):
        part, own = q[:, :, i : i + queries], later.queries[:, :, i : i + queries]
        for start in range(0, T, tile):
            keys = k[:, start : start + tile]
            values = part @ keys.transpose(1, 2).unsqueeze(1)
            at = positions[start : start + tile]
            values = values.masked_fill_(at > own, -math.inf)
            values = F.pad(values, (0, -keys.shape[1] % size), value=-math.inf)
            first = start // size
            most = values.unflatten(3, (-1, size)).amax(-1)
            found[:, :, i : i + queries, first : first + most.shape[3]] = most
    return found
