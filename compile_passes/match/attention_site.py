"""From a matched core to the operator's arguments: which axes are batch, heads, queries, keys,
features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import fx

from compile_passes.graph import layout
from compile_passes.graph.axes import Axis, Dims, Group, flat, resolve, same
from compile_passes.graph.ir import Value
from compile_passes.graph.vocabulary import raw_name
from compile_passes.match.match_state import Core, Leaf, MatchedScores, RowStatistic
from compile_passes.report import Refused


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """An attention and the axes of its call.

    Query is laid out (batch, heads, queries, head_dim), key and value with `kv_heads`, which are
    the first of `heads`.
    """

    core: Core
    q: Leaf
    k: Leaf
    v: Leaf
    batch: Group
    heads: Group
    kv_heads: Group
    queries: Group
    keys: Group
    head_dim: Group
    features: Group
    dtype: torch.dtype  # what q, k, v are computed in
    sums: tuple[RowStatistic, ...] = ()  # log-sum-exps of the scores that something else reads

    @property
    def scores(self) -> MatchedScores:
        return self.core.weights.scores

    @property
    def sunk(self) -> bool:
        """Whether a sink stands in the denominator."""
        return self.core.weights.zero_sink or self.scores.column is not None

    @property
    def trains(self) -> bool:
        """Whether a gradient flows through the weights."""
        return self.core.out.tensor.requires_grad

    @property
    def out_dims(self) -> Dims:
        return (self.batch, self.heads, self.queries, self.features)

    @property
    def mask_dims(self) -> Dims:
        return (self.batch, self.heads, self.queries, self.keys)


def attention_site(core: Core, sums: Sequence[RowStatistic] = ()) -> AttentionSite:
    """The call that a core becomes. Raises Refused where it can't be one that changes nothing.

    `sums`: every log-sum-exp of the graph.
    """
    sums = tuple(row for row in sums if _is_its_sum(row, core))
    _check_uses(core, sums)
    _check_modes(core)
    scores = core.weights.scores
    keys = resolve(core.weights.keys)
    q, k = scores.a, scores.b
    if set(keys) & q.axes():
        q, k = k, q
    rows = _rows(scores, q, k)
    dtype = core.out.dtype
    q, k, v = (Leaf(*layout.peel(x.value, x.dims, dtype, core.out)) for x in (q, k, core.v))
    _check_dtypes(core, (q, k, v))
    rows, keys = resolve(rows), resolve(keys)
    batch = [a for a in flat(core.weights.dims) if a not in rows and a not in keys]
    shared = [a for a in batch if a not in k.axes() and a not in v.axes()]
    sink = scores.column.axes() if scores.column else set()
    batch_group, heads, kv_heads = _split(batch, shared, sink, core.weights.dims)
    made = AttentionSite(
        core, q, k, v, batch_group, heads, kv_heads, rows, keys,
        resolve(scores.summed), resolve(core.features), dtype, sums,
    )  # fmt: skip
    _check_supported(made)
    return made


def _rows(scores: MatchedScores, q: Leaf, k: Leaf) -> Group:
    """The query axis: the last of the product's axes that the key lacks. Others are heads that
    share a key.
    """
    alone = q.axes() - k.axes() - set(resolve(scores.summed))
    rows = [g for g in scores.product_dims if g and set(resolve(g)) <= alone]
    return rows[-1] if rows else ()


def _split(
    batch: list[Axis], shared: list[Axis], sink: set[Axis], dims: Dims
) -> tuple[Group, Group, Group]:
    """(batch, heads, key heads): trailing axes that key and value lack are query heads grouped on
    one key head; what a sink varies over is a head, and what stands behind a batch of 1 in `dims`.
    """
    group: list[Axis] = []
    rest = list(batch)
    while rest and rest[-1] in shared:
        group.insert(0, rest.pop())
    behind = rest and dims[0] == () and any(rest[-1] in resolve(group) for group in dims)
    headed = len(rest) >= 2 or behind or (rest and rest[-1] in sink)
    kv = (rest.pop(),) if headed else ()
    return tuple(rest), (*kv, *group), kv


_SAME = ("a", "b", "scale", "factors", "divisors", "softcap", "terms", "summed")


def _is_its_sum(row: RowStatistic, core: Core) -> bool:
    """Whether a log-sum-exp that is read outside the core is that of its scores."""
    mine, theirs = core.weights.scores, row.scores
    shifted = theirs.shift or theirs.column or mine.column
    if shifted or resolve(row.keys) != resolve(core.weights.keys):
        return False
    if not all(getattr(mine, name) == getattr(theirs, name) for name in _SAME):
        return False
    inside = {value.node for value in core.path}
    return not inside.issuperset(row.path[-1].node.users)


def _check_uses(core: Core, sums: tuple[RowStatistic, ...]) -> None:
    apart = {row.path[-1].node for row in sums}
    inside = {value.node for value in core.path} | {core.out.node} | apart
    for value in core.path:
        for user in value.node.users if value.node not in apart else ():
            if user not in inside and not _reads_shape_only(value.node, user, inside):
                what = "the attention weights are" if _is_weights(value, core) else "the scores are"
                reader = "returned" if user.op == "output" else f"also read by {raw_name(user)}"
                raise Refused(f"{what} {reader}; fused attention never computes them")


_SHAPE_READERS = frozenset(
    "size dim numel shape full_like zeros_like ones_like rand_like new_zeros new_full".split()
)
_SECOND_SHAPE = frozenset("expand_as view_as reshape_as type_as".split())
_VIEWS = frozenset("view reshape transpose permute unsqueeze squeeze".split())


def _reads_shape_only(node: fx.Node, user: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether `user` asks only for the shape, and nothing that lives on needs its result."""
    name = raw_name(user)
    if name in _VIEWS and _unread(user):  # tracing has turned its shape into numbers
        return True
    second = name in _SECOND_SHAPE and user.args[0] is not node
    return (second or name in _SHAPE_READERS) and _dies(user, inside)


def _dies(node: fx.Node, inside: set[fx.Node]) -> bool:
    return all(user in inside or _dies(user, inside) for user in node.users)


def _unread(node: fx.Node) -> bool:
    """Whether a view's contents are not read, or only for an unused mean:
    nn.MultiheadAttention's average over the heads, in exported programs.
    """
    known = raw_name(node) in _VIEWS | _SHAPE_READERS | {"mean"}
    return known and all(map(_unread, node.users))


def _is_weights(value: Value, core: Core) -> bool:
    return value.index >= core.weights.softmax.index


def _check_modes(core: Core) -> None:
    if len({value.grad for value in (*core.path, core.out)}) > 1:
        raise Refused("a part of it runs under another gradient mode than the rest")
    if core.out.writes:
        raise Refused("the value product writes into another tensor")


MAX_HEAD_DIM = 256  # of the GPU kernels


def _check_supported(site: AttentionSite) -> None:
    """What would make the call itself raise."""
    for name, leaf in (("query", site.q), ("key", site.k), ("value", site.v)):
        tensor = leaf.value.tensor
        if tensor.device.type not in ("cpu", "cuda"):
            raise Refused(f"{name} is on {tensor.device.type}")
    if any(same(a.size, 0) for a in (*site.head_dim, *site.features)):
        raise Refused("a head dimension is 0")
    if site.q.value.tensor.device.type == "cuda":
        for group in (site.head_dim, site.features):
            size = math.prod(a.size for a in group)
            if type(size) is not int or size > MAX_HEAD_DIM:
                raise Refused(f"the head dimension is {size}, the kernels go to {MAX_HEAD_DIM}")
        if site.dtype == torch.float64:
            raise Refused("float64 is supported on CPU only")


def _check_dtypes(core: Core, operands: tuple[Leaf, ...]) -> None:
    """The operator computes in one dtype and returns it; rounding an operand to it is right only
    where autocast did the same.
    """
    out, product = core.out.dtype, core.weights.scores.product.dtype
    for leaf in operands:
        given = leaf.value.dtype
        widened = given.itemsize < out.itemsize
        if given != out and not widened and product != out:
            raise Refused(f"query and key are multiplied in {product}, weights and value in {out}")
