"""flex_attention where its functions are graphs: inside `torch.compile` and `torch.export`.

TorchDynamo makes graphs of the functions that a higher-order operator is given, and inputs of what
they capture, tensors and sizes. The operator here is in Dynamo's graphs alone. Whatever traces or
runs it reads these graphs as an eager call reads functions, and sees the operations that compute
terms, and one call of `fa::attention` or `fa::attention_programmed`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from fa_ops.functions import flex
from fa_ops.functions.largest_scores import ScoreChanges

# Graphs as functions.

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_LIBRARIES = torch.__path__[0], str(Path(__file__).parents[1])


def function_of(graph: Callable, captured: tuple) -> Callable[..., Tensor]:
    """The function that a graph is, with what it captures; errors name it and its line.

    Where TorchDynamo cannot trace a function, and breaks its graph, the function comes as it is.
    """
    if not isinstance(graph, fx.GraphModule):
        if getattr(graph, "__module__", None) != __name__ or not graph.__closure__:
            return graph  # of a BlockMask, or one of those below
        cells = zip(graph.__code__.co_freevars, graph.__closure__, strict=True)
        inner = {name: cell.cell_contents for name, cell in cells}
        own = inner.get("score_mod", inner.get("mask_mod"))
        if own is not None:  # errors name the user's, not that of `attend`
            graph.__qualname__ = getattr(own, "__qualname__", type(own).__name__)
            if not inner.get("buffers"):  # else it has other parameters
                graph.__wrapped__ = own
        return graph
    function = lambda *args: graph.forward(*args, *captured)  # noqa: E731
    file, line, name = _place(graph)
    function.__code__ = function.__code__.replace(co_filename=file, co_firstlineno=int(line))
    function.__qualname__ = name
    return function


def _place(graph: fx.GraphModule) -> tuple[str, str, str]:
    """The file, line and function of the first operation that is the user's."""
    for node in graph.graph.nodes:
        for frame in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
            if not frame[0].startswith(_LIBRARIES):
                return frame
    return "a graph", "1", "forward"


class ListedBlocks:
    """What a BlockMask lists, under the names that it has there."""

    def __init__(
        self, lists: Sequence[Tensor | None], seq_lengths: tuple, block: tuple, mask_mod: Callable,
        decides: bool,
    ) -> None:  # fmt: skip
        self.decides = decides  # False: they are known to be those of mask_mod
        self.kv_num_blocks, self.kv_indices = lists[:2]
        self.full_kv_num_blocks, self.full_kv_indices = lists[2:]
        self.seq_lengths, self.BLOCK_SIZE, self.mask_mod = seq_lengths, block, mask_mod


# The operator.


class Settings(NamedTuple):
    """What decides a call beside tensors and functions."""

    has_score: bool
    has_mask: bool
    enable_gqa: bool
    is_causal: bool
    window: Any
    deterministic: bool
    backend: str | None
    with_lse: bool
    with_max: bool = False
    lists_decide: bool = True  # False: the lists of blocks are known to be those of mask_mod


class FlexAttention(HigherOrderOperator):
    """The operator in Dynamo's graphs, whose functions are graphs there."""

    def __init__(self) -> None:
        super().__init__("fa_ops_flex_attention")
        # TorchDynamo knows by the name which arguments are functions: as torch's own operator has
        # them. Where graphs become code, the module tells the two apart.
        self.__name__, self.__module__ = "flex_attention", __name__

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, score_mod: Callable, others: tuple,
        scale: float | None, settings: dict[str, Any], score_captured: tuple = (),
        mask_captured: tuple = (),
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """(out,), (out, lse), or also the largest scores.

        `others` are lists and tensors, and mask_mod at the end.
        """
        chosen = Settings(**settings)
        *lists, Sq, Sk, rows, columns, runs, ranges, lens, sinks, changes, mask = others
        score = mask_mod = None
        if chosen.has_score:
            score = function_of(score_mod, score_captured)
        if chosen.has_mask:
            mask_mod = function_of(mask, mask_captured)
        block_mask = runs
        if lists[0] is not None:
            block_mask = ListedBlocks(
                lists, (Sq, Sk), (rows, columns), mask_mod, chosen.lists_decide
            )
            mask_mod = None
        given = flex.Arguments(
            query, key, value, score, block_mask, scale, chosen.enable_gqa, mask_mod, (),
            chosen.is_causal, chosen.window, ranges, lens, sinks, chosen.deterministic,
            chosen.backend, None if changes is None else ScoreChanges(*changes),
        )  # fmt: skip
        attend = flex.attend if isinstance(score_mod, fx.GraphModule) else _attend_untraced
        results = attend(given, chosen.with_lse, chosen.with_max)
        return results if chosen.with_lse else (results,)


flex_attention = FlexAttention()
_attend_untraced = torch.compiler.disable(flex.attend)  # where TorchDynamo has broken its graph


# What TorchDynamo traces.


def _identity(score, b, h, i, j):
    return score


def _everything(b, h, i, j):
    return b >= 0


def attend(given: flex.Arguments, with_lse: bool, with_max: bool) -> Tensor | tuple[Tensor, ...]:
    """out, or (out, lse), or also the largest scores, by the operator."""
    score_mod, mask_mod, buffers = given.score_mod, given.mask_mod, given.buffers
    block_mask, runs = given.block_mask, None
    lists: tuple = (None,) * 8
    score = None if score_mod is None else lambda *args: score_mod(*args, *buffers)
    mask = None if mask_mod is None else lambda *args: mask_mod(*args, *buffers)
    if isinstance(block_mask, Tensor):
        runs = block_mask
    elif block_mask is not None:
        lists = (
            block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices, *block_mask.seq_lengths, *block_mask.BLOCK_SIZE,
        )  # fmt: skip
        if mask is not None:  # the lists are not of this one
            score = _masked(_identity if score is None else score, mask)
        mask = block_mask.mask_mod
    settings = Settings(
        score is not None, mask is not None, given.enable_gqa, given.is_causal, given.window,
        given.deterministic, given.backend, with_lse, with_max,
    )  # fmt: skip
    # TorchDynamo of torch 2.11 finds no truth in a function that it traces
    score, mask = _identity if score is None else score, _everything if mask is None else mask
    changes = None if given.score_changes is None else tuple(given.score_changes)
    others = (*lists, runs, given.key_ranges, given.kv_lens, given.sinks, changes, mask)
    results = flex_attention(
        given.query, given.key, given.value, score, others, given.scale,
        settings._asdict(),
    )  # fmt: skip
    if with_max:
        return results[0], results[1], results[2]
    return (results[0], results[1]) if with_lse else results[0]


def _masked(score: Callable, mask: Callable) -> Callable:
    """A score that is -inf where a mask is false."""
    return lambda s, *indices: torch.where(mask(*indices), score(s, *indices), -torch.inf)
