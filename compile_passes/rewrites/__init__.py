"""What is changed before attention is matched: an ordered list, and a log that undoes edits which
led to no fusion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from compile_passes.rewrites.attention_calls import write_out_multi_head, write_out_sdpa
from compile_passes.rewrites.edit_log import EditLog
from compile_passes.rewrites.einsums import split_einsums
from compile_passes.rewrites.flex_attention import write_out_flex
from compile_passes.rewrites.readers import detach_metadata_readers, drop_unused_nodes
from compile_passes.rewrites.weight_sums import (
    distribute_products,
    divide_products,
    split_joined_keys,
)
from compile_passes.rewrites.writes import rewrite_indexed_writes, rewrite_viewed_writes


class Rewrite(NamedTuple):
    """One rewrite of a graph; `reason` is why it has its place in the order."""

    name: str
    reason: str
    function: Callable[[EditLog], None]


REWRITES: tuple[Rewrite, ...] = (
    Rewrite(
        "readers of metadata",
        "first: what they no longer read may be unused then",
        detach_metadata_readers,
    ),
    Rewrite(
        "unused nodes",
        "before all that asks who else reads scores or weights",
        drop_unused_nodes,
    ),
    Rewrite(
        "multi-head attention",
        "calls come before the rewrites of operations; their order among themselves is free",
        write_out_multi_head,
    ),
    Rewrite(
        "scaled_dot_product_attention",
        "a call; those inside multi-head attention have been traced into operations",
        write_out_sdpa,
    ),
    Rewrite(
        "FlexAttention",
        "a call",
        write_out_flex,
    ),
    Rewrite(
        "writes into views",
        "before writes by index: a write into a view of a part becomes one",
        rewrite_viewed_writes,
    ),
    Rewrite(
        "writes by index",
        "before all that follows scores and weights from reader to reader, where a write ends",
        rewrite_indexed_writes,
    ),
    Rewrite(
        "einsums",
        "before what looks for products: these are einsums of two operands with an equation",
        split_einsums,
    ),
    Rewrite(
        "joined keys",
        "after einsums, by which the parts of the weights may be multiplied",
        split_joined_keys,
    ),
    Rewrite(
        "weights over their sum",
        "before sums of weights: once a division follows the product, that may be one of a sum",
        divide_products,
    ),
    Rewrite(
        "sums of weights",
        "last: it repeats itself on the products that it makes",
        distribute_products,
    ),
)
