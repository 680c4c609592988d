"""The axes of a matched attention: batch, heads, queries, keys and features of the call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import fx

from compile_passes.ir.axes import Axis, Dims, Group, all_axes, resolve, sizes_equal
from compile_passes.ir.graph import example, requires_grad, undo_layout
from compile_passes.ir.vocabulary import raw_name, read_elsewhere
from compile_passes.match.states import Core, Leaf, MatchedScores, RowStatistic
from compile_passes.report import Refusal
from fa_ops.call.options import MAX_HEAD_DIM


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """An attention and the axes of the call that can replace it.

    The query is laid out (batch, heads, queries, head_dim), key and value with `kv_heads`, which
    are the leading axes of `heads`.
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
    dtype: torch.dtype  # of the arguments and the result
    lses: tuple[RowStatistic, ...] = ()  # log-sum-exps of the scores that the model reads

    @property
    def scores(self) -> MatchedScores:
        """The scores of the attention."""
        return self.core.weights.scores

    @property
    def has_sink(self) -> bool:
        """Whether the denominator has a sink."""
        return self.core.weights.zero_sink or self.scores.sink is not None

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows through the weights."""
        return self.core.out.tensor.requires_grad

    @property
    def row_dims(self) -> Dims:
        """(B, Hq, Sq), the dims of the log-sum-exp."""
        return (self.batch, self.heads, self.queries)

    @property
    def key_dims(self) -> Dims:
        """(B, Hkv, Sk), the leading dims of key and value."""
        return (self.batch, self.kv_heads, self.keys)

    @property
    def out_dims(self) -> Dims:
        """(B, Hq, Sq, Dv), the dims of the result."""
        return (*self.row_dims, self.features)

    @property
    def mask_dims(self) -> Dims:
        """(B, Hq, Sq, Sk), the dims of the scores."""
        return (*self.row_dims, self.keys)


def attention_site(core: Core, lses: Sequence[RowStatistic] = ()) -> AttentionSite:
    """The site of a core; `lses` are all log-sum-exps of the graph. Raises Refusal where no call
    computes the same.
    """
    lses = tuple(row for row in lses if _is_lse_of_scores(row, core))
    _check_uses(core, lses)
    _check_modes(core)
    scores = core.weights.scores
    keys = resolve(core.weights.keys)
    q, k = scores.a, scores.b
    if set(keys) & q.axes():
        q, k = k, q
    queries = _query_axis(scores, q, k)
    dtype = core.out.dtype
    q, k, v = (Leaf(*undo_layout(x.value, x.dims, dtype, core.out)) for x in (q, k, core.v))
    _check_dtypes(core, (q, k, v))
    queries, keys = resolve(queries), resolve(keys)
    of_values = v.axes().union(*(gate.axes() for gate in core.weights.gate_leaves()))
    if of_values & set(queries) - v.axes():
        raise Refusal(
            "the attention weights are multiplied by a tensor that varies over queries and keys"
        )
    if (k.axes() - set(keys) - set(resolve(scores.summed))) - q.axes() - of_values:
        raise Refusal("each query has keys of its own, but all have the same values")
    batch = [a for a in all_axes(core.weights.dims) if a not in queries and a not in keys]
    shared = [a for a in batch if a not in k.axes() and a not in of_values]
    sink = scores.sink.axes() if scores.sink else set()
    batch_group, heads, kv_heads = _split_heads(batch, shared, sink, core.weights.dims)
    site = AttentionSite(
        core, q, k, v, batch_group, heads, kv_heads, queries, keys,
        resolve(scores.summed), resolve(core.features), dtype, lses,
    )  # fmt: skip
    _check_supported(site)
    return site


def _query_axis(scores: MatchedScores, q: Leaf, k: Leaf) -> Group:
    """The last of the product's axes that the key lacks; the others are heads that share a key."""
    alone = q.axes() - k.axes() - set(resolve(scores.summed))
    found = [g for g in scores.product_dims if g and set(resolve(g)) <= alone]
    return found[-1] if found else ()


def _split_heads(
    batch: list[Axis], shared: list[Axis], sink: set[Axis], dims: Dims
) -> tuple[Group, Group, Group]:
    """(batch, heads, key heads): trailing axes that key and value lack are query heads that share a
    key head. A single remaining axis is heads if a sink varies along it or if `dims` start with a
    batch of 1, and batch otherwise.
    """
    group: list[Axis] = []
    rest = list(batch)
    while rest and rest[-1] in shared:
        group.insert(0, rest.pop())
    batch_of_one = rest and dims[0] == () and any(rest[-1] in resolve(group) for group in dims)
    has_heads = len(rest) >= 2 or batch_of_one or (rest and rest[-1] in sink)
    kv = (rest.pop(),) if has_heads else ()
    return tuple(rest), (*kv, *group), kv


_DEFINING_FIELDS = ("a", "b", "scale", "factors", "divisors", "softcap", "terms", "summed")


def _is_lse_of_scores(row: RowStatistic, core: Core) -> bool:
    """Whether a log-sum-exp is read outside the core and is that of its scores."""
    scores, others = core.weights.scores, row.scores
    if (
        others.shift
        or others.sink
        or scores.sink
        or resolve(row.keys) != resolve(core.weights.keys)
    ):
        return False
    if not all(getattr(scores, name) == getattr(others, name) for name in _DEFINING_FIELDS):
        return False
    inside = {value.node for value in core.path}
    return not inside.issuperset(row.path[-1].node.users)


def _check_uses(core: Core, lses: tuple[RowStatistic, ...]) -> None:
    """Raises Refusal where the scores or weights are read by anything outside the core."""
    replaced = {row.path[-1].node for row in lses}
    inside = {value.node for value in core.path} | {core.out.node} | replaced
    for value in core.path:
        weights = value.index >= core.weights.softmax.index
        for user in value.node.users if value.node not in replaced else ():
            if user not in inside and not _reads_shape_only(value.node, user, inside):
                what = "the attention weights are" if weights else "the scores are"
                raise Refusal(read_elsewhere(what, user))


_SHAPE_READERS = frozenset(
    "size dim numel shape full_like zeros_like ones_like rand_like new_zeros new_full".split()
)
_SHAPE_OF_SECOND = frozenset("expand_as view_as reshape_as type_as".split())
_COPIES = frozenset("mean detach clone contiguous".split())
_VIEWS = frozenset("view reshape transpose permute unsqueeze squeeze".split())


def _reads_shape_only(node: fx.Node, user: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether `user` depends on the shape alone, and only nodes of the core need its result."""
    name = raw_name(user)
    if _is_unread(user):
        return True
    as_second = name in _SHAPE_OF_SECOND and user.args[0] is not node
    return (as_second or name in _SHAPE_READERS) and _only_feeds(user, inside)


def _only_feeds(node: fx.Node, inside: set[fx.Node]) -> bool:
    return all(user in inside or _only_feeds(user, inside) for user in node.users)


def _is_unread(node: fx.Node) -> bool:
    """Whether a view, copy or mean is not read: tracing replaced its shape by numbers, or an
    exported program averages the weights of nn.MultiheadAttention.
    """
    known = raw_name(node) in _VIEWS | _SHAPE_READERS | _COPIES
    return known and all(map(_is_unread, node.users))


def _check_modes(core: Core) -> None:
    shift = core.weights.scores.shift
    maximum = set(shift.path) - set(shift.scores.path) if shift else set()  # needs no gradient
    values = [value for value in (*core.path, core.out) if value not in maximum]
    nodes = {x for value in values for x in (value.node, *value.node.all_input_nodes)}
    has_gradient = any(getattr(example(x), "requires_grad", False) for x in nodes)
    # the caller's mode is known where a result without it would not require grad
    proofs = (x.grad is None and not x.writes and requires_grad(x) for x in values)
    caller = True if any(proofs) else None
    modes = {caller if value.grad is None else value.grad for value in values}
    if has_gradient and len(modes) > 1:
        raise Refusal("a part of it runs under another gradient mode than the rest")
    if core.out.writes:
        raise Refusal("the value product writes into another tensor")


def _check_supported(site: AttentionSite) -> None:
    """Raises Refusal where the operator would raise."""
    for name, leaf in (("query", site.q), ("key", site.k), ("value", site.v)):
        device = leaf.value.tensor.device.type
        if device not in ("cpu", "cuda"):
            raise Refusal(f"{name} is on {device}")
    if any(sizes_equal(a.size, 0) for a in (*site.head_dim, *site.features)):
        raise Refusal("a head dimension is 0")
    if site.q.value.tensor.device.type == "cuda":
        for group in (site.head_dim, site.features):
            size = math.prod(a.size for a in group)
            if type(size) is not int or size > MAX_HEAD_DIM:
                raise Refusal(
                    f"the head dimension is {size}, and GPU kernels support at most {MAX_HEAD_DIM}"
                )
        if site.dtype == torch.float64:
            raise Refusal("float64 is supported on CPU only")


def _check_dtypes(core: Core, operands: tuple[Leaf, ...]) -> None:
    """Raises Refusal where an operand would be rounded that autocast does not round."""
    out, product = core.out.dtype, core.weights.scores.product.dtype
    for leaf in operands:
        given = leaf.value.dtype
        widened = given.itemsize < out.itemsize
        if given != out and not widened and product != out:
            raise Refusal(f"query and key are multiplied in {product}, weights and value in {out}")
