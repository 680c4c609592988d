"""Whether replacing a call of scaled_dot_product_attention or FlexAttention pays: one table of
rules, of which the first that holds decides.

The measurements are those of docs/performance/models.md and cpu.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_passes.ir.axes import is_one
from compile_passes.masks.mask_terms import ClassifiedMasks, EmptyRows
from compile_passes.match.attention_site import AttentionSite
from compile_passes.rewrites.edit_log import AttentionCall


class CallCase(NamedTuple):
    """The facts by which the rules decide."""

    site: AttentionSite
    masks: ClassifiedMasks
    call: AttentionCall

    @property
    def device(self) -> torch.device:
        """The device of the call."""
        return self.site.q.value.tensor.device


class Rule(NamedTuple):
    """A call for which `holds` is true is taken or left, for this reason."""

    holds: Callable[[CallCase], bool]
    taken: bool
    reason: str


def _reads_mask_for_gradients(case: CallCase) -> bool:
    """Whether the rows without keys, or large numbers, are to be found in a mask first."""
    return case.masks.empty_rows is EmptyRows.ABSORBED and case.site.requires_grad


def _stored(case: CallCase) -> list[Tensor]:
    """What FlexAttention computes in its kernel and the operator would read, for all queries and
    keys.
    """
    both = {*case.site.queries}, {*case.site.keys}
    leaves = [leaf for leaf in case.masks.leaves if all(leaf.axes() & axes for axes in both)]
    own = case.call.nodes if case.call.operation == "flex_attention" else ()
    return [x.value.tensor for x in leaves if x.value.op != "reshape" and x.value.node in own]


def _stores_a_small_mask(case: CallCase) -> bool:
    """Whether that is one mask of bools, no larger than the query, and Hopper's kernels read it."""
    stored, q = _stored(case), case.site.q.value.tensor
    fits = len(stored) == 1 and stored[0].dtype == torch.bool
    small = fits and statically_known_true(stored[0].numel() <= q.numel() * q.dtype.itemsize)
    return small and _is_on_hopper(case) and not _is_wide_on_gpu(case)


def _computes_scores(case: CallCase) -> bool:
    return bool(_stored(case))


def _mask_becomes_compact(case: CallCase) -> bool:
    """Whether the mask, or a part of it, needs no reading of all its elements."""
    masks = case.masks
    compact = masks.interval or masks.left is not None or masks.right is not None
    return case.call.has_mask and bool(compact or not masks.is_dense)


def _is_wide_on_gpu(case: CallCase) -> bool:
    return case.device.type == "cuda" and case.site.dtype.itemsize > 2


def _is_on_hopper(case: CallCase) -> bool:
    return case.device.type == "cuda" and compute_capability(case.device)[0] == 9


def _repeats_heads(case: CallCase) -> bool:
    return len(case.site.heads) > len(case.site.kv_heads)


def _is_one_query_on_cpu(case: CallCase) -> bool:
    queries = case.site.queries
    return case.device.type == "cpu" and all(is_one(axis.size) for axis in queries)


def compute_capability(device: torch.device) -> tuple[int, int]:
    """That of a CUDA device, (0, 0) where this machine has none."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


RULES = (
    Rule(
        _reads_mask_for_gradients,
        False,
        "its mask may leave rows without keys, which training has to find first",
    ),
    # H200, causal: FlexAttention takes 3.06 and 7.63 ms forward and backward, with a mask of bools
    # the operator takes 1.69 and 4.74
    Rule(_stores_a_small_mask, True, "its mask is stored, in no more bytes than the query"),
    Rule(_computes_scores, False, "its scores or mask would be stored for every query and key"),
    # CPU, 2048 keys, one core: a window of 128 given as a mask takes 124 ms, the operator 24;
    # a causal mask 210 and 71
    Rule(_mask_becomes_compact, True, "its mask becomes compact, and masked tiles are skipped"),
    Rule(_is_wide_on_gpu, False, "the GPU kernels are made for 16 bits"),
    # H200, Llama of 8B shape: SDPA takes 1.36 times as long in the prefill, 1.21 in training
    Rule(_is_on_hopper, True, "the kernels for Hopper are faster"),
    # CPU, 8 and 2 heads, 1 query, 1024 keys: 1.9 ms with repeated keys and values, 0.45 without
    Rule(_repeats_heads, True, "keys and values are not repeated"),
    # CPU, 8 heads, 1 query, 1024 keys: 2.2 ms and 1.2
    Rule(_is_one_query_on_cpu, True, "for one query the keys are split among the cores"),
    Rule(lambda case: True, False, "torch computes it as fast"),
)


def decide(site: AttentionSite, masks: ClassifiedMasks, call: AttentionCall) -> tuple[bool, str]:
    """(whether the call is replaced, why)"""
    case = CallCase(site, masks, call)
    rule = next(rule for rule in RULES if rule.holds(case))
    return rule.taken, rule.reason
