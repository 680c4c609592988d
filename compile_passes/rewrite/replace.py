"""Writing an attention into the graph as one call of torch.ops.fa.attention."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

import fa_ops  # noqa: F401  defines torch.ops.fa
from compile_passes.graph import constants, layout, vocabulary
from compile_passes.graph.axes import Size, is_one, same
from compile_passes.graph.ir import Value, View, example
from compile_passes.masks import symbolic_eval
from compile_passes.masks.classify import Dead, Masks
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.match_state import BiasTerm, FillTerm, Leaf
from compile_passes.report import Refused, log
from compile_passes.rewrite import dead_rows, log_sums, mask_nodes
from compile_passes.rewrite.emitter import Emitter
from compile_passes.rewrite.key_range_nodes import limits
from compile_passes.rewrite.operands import aligned, cast, operand, with_rows
from compile_passes.rewrite.verify import Unverified, difference

# Operations without effect besides their result.
PURE = (
    layout.LAYOUT
    | symbolic_eval.HANDLERS.keys()
    | constants.FILLED.keys()
    | {"repeat_interleave", "div", "full", "bernoulli", "rand", "rand_like", "size"}
)
ATTENTION = torch.ops.fa.attention.default
WITH_LSE = torch.ops.fa.attention_with_lse.default


def rewrite(site: AttentionSite, masks: Masks, view: View, verify: bool = False) -> fx.Node:
    """Replace the core's nodes. Raises Refused, with the graph unchanged, where that can't be
    done, or where with `verify` the numbers differ.
    """
    out = site.core.out.node
    leaves = [site.q, site.k, site.v, *_outside(site)]
    joined = [t.mask if isinstance(t, FillTerm) else t.leaf for t in masks.terms]
    leaves += [leaf for leaf in joined if leaf not in leaves]
    for leaf in leaves:
        tensor = leaf.value.tensor
        if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
            raise Refused(f"{leaf.value.node.name} is not a plain tensor: {type(tensor).__name__}")
        if not view.intact(leaf.value, site.core.out):
            raise Refused(f"{leaf.value.node.name} is written to before the value product")
    emitter = Emitter(view.graph, out, [x for x in leaves if isinstance(x.value.tensor, Tensor)])
    try:
        call, replaced = _emit(site, masks, emitter, view)
        for old, new in replaced.items():
            _check_result(example(new), example(old))
        doomed = _doomed(site)
        if doomed & {n for made in emitter.made for n in made.all_input_nodes}:
            raise Refused("what joins the scores is made with their shape")
        late = log_sums.readers(site, view, emitter, doomed)
        for old, new in replaced.items() if verify else ():
            _verify(site, view, emitter, old, new)
    except BaseException:
        emitter.undo()
        raise
    log_sums.move(late, out)
    for old, new in replaced.items():
        old.replace_all_uses_with(new, lambda user: user not in doomed)
    _erase({*doomed, out}, view)
    for value in (site.core.out, *(row.path[-1] for row in site.sums)):
        value.node = replaced[value.node]  # other cores may read it
    return call


def _verify(site: AttentionSite, view: View, emitter: Emitter, old: fx.Node, new: fx.Node) -> None:
    if site.core.weights.dropout_p:
        return  # two draws differ
    inputs = {leaf.value.node for leaf in (site.q, site.k, site.v)}
    made = set(emitter.made)

    def runs(node: fx.Node) -> bool:
        name = vocabulary.call(node)[0]
        return node in made or name in PURE or name in ("tensor", "scalar_tensor")

    try:
        found = difference(view, old, new, inputs, runs)
    except Unverified as failure:
        counters["fa_ops"]["not verified"] += 1
        log.warning("a rewrite could not be verified: %s", failure)
        return
    if found:
        raise Refused(f"verification failed, please report: {found}")
    counters["fa_ops"]["verified"] += 1


def _outside(site: AttentionSite) -> list[Leaf]:
    """Every leaf besides query, key and value."""
    scores = site.scores
    found = [*scores.factors, *scores.divisors, *site.core.weights.factors]
    found += [t.leaf for t in scores.terms if isinstance(t, BiasTerm)]
    found += [t.mask for t in scores.terms if isinstance(t, FillTerm)]
    found += [scores.column] if scores.column else []
    return [leaf for leaf in found if isinstance(leaf.value, Value)]


def _emit(
    site: AttentionSite, masks: Masks, emitter: Emitter, view: View
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """(the call, by each node to replace the one that does)"""
    if site.sums:
        log_sums.check(site, masks)
    rows = (site.batch, site.heads, site.queries)
    columns = (site.batch, site.kv_heads, site.keys)
    q = operand(emitter, site.q, (*rows, site.head_dim), site.dtype)
    k = operand(emitter, site.k, (*columns, site.head_dim), site.dtype)
    v = operand(emitter, site.v, (*columns, site.features), site.dtype)
    q, k, scale = _scale(site, emitter, q, k)
    if scale is not None and scale < 0:  # kernels may take the maximum before they scale
        q, scale = emitter.function(operator.neg, q), -scale
    options: dict[str, object] = {} if scale is None else {"scale": scale}
    dead = None
    if masks.interval:
        found, dead = limits(site, masks.interval, view, emitter, q, masks.dead is not Dead.ZERO)
        options |= found
    written = mask_nodes.write(site, masks, emitter, q, dead)
    mask = written.mask
    if masks.zeroed:
        k, mask = mask_nodes.zeroed_keys(site, masks.zeroed, emitter, k)
    options |= _numbers(site, masks, emitter, q)
    beside = site.sunk and mask_nodes.sinks_beside(site, masks)
    sink = mask_nodes.sink(site, emitter, q, beside) if site.sunk else None
    if site.sunk and not beside:
        options["sinks"] = sink
    p = site.core.weights.dropout_p
    given, k, v = (with_rows(emitter, x) for x in (written.query, k, v))
    target = WITH_LSE if site.sums or beside else ATTENTION
    causal = masks.right == 0
    call = result = emitter.function(target, given, k, v, mask, p, causal, **options)
    lse = None
    if target is WITH_LSE:
        result, lse = (emitter.function(operator.getitem, call, i) for i in (0, 1))
        lse = log_sums.of_rows(site, emitter, masks, written, lse)
    if masks.dead is Dead.ABSORBED and dead_rows.scores_require_grad(site, masks):
        cold = dead_rows.EmittedCall(with_rows(emitter, q), k, v, p, options)
        more = dead_rows.pass_on(masks, written, emitter, cold, result, bool(site.sums))
        result = cast(emitter, emitter.function(operator.add, result, more[0]), site.dtype)
        lse = emitter.function(operator.add, lse, more[1]) if site.sums else lse
    if beside:
        result = log_sums.scale_by_sink(emitter, result, lse, sink, site.dtype)
    result = _finished(site, emitter, result)
    replaced = {site.core.out.node: _restride(emitter, result, site.core.out.node)}
    for old, new in log_sums.write(site, emitter, lse).items():
        replaced[old] = _restride(emitter, new, old)
    return call, replaced


def _numbers(site: AttentionSite, masks: Masks, emitter: Emitter, q: fx.Node) -> dict[str, object]:
    """The options that are not tensors, and the seed of a dropout."""
    options: dict[str, object] = {}
    if site.scores.softcap:
        options["softcap"] = site.scores.softcap
    if masks.left is not None:
        options["window_left"] = masks.left
    if masks.right not in (None, 0):
        options["window_right"] = masks.right
    if site.core.weights.dropout_p:
        options["dropout_seed"] = emitter.function(
            torch.randint, 0, 2**62, (1,), dtype=torch.int64, device=example(q).device
        )
    return options


def _finished(site: AttentionSite, emitter: Emitter, result: fx.Node) -> fx.Node:
    """The result times what the weights were multiplied by, laid out as the original."""
    gain = site.core.weights.gain
    if not math.isclose(gain, 1.0, rel_tol=1e-9):
        result = emitter.function(operator.mul, result, gain)
    for leaf in site.core.weights.factors:
        factor = aligned(emitter, leaf, (site.batch, site.heads, site.queries, ()))
        result = emitter.function(operator.mul, result, factor)
    result = cast(emitter, result, site.dtype)
    return emitter.arrange(result, site.out_dims, site.core.dims)


def _scale(site: AttentionSite, emitter: Emitter, q: fx.Node, k: fx.Node):
    """Constant factors become the operator's scale; tensors and symbolic numbers multiply the
    query, or the key.
    """
    scores = site.scores
    factors = [(x, operator.mul) for x in scores.factors]
    factors += [(x, operator.truediv) for x in scores.divisors]
    plain = len(factors) == 1 and scores.scale == 1.0 and not scores.softcap
    if plain and _is_default_scale(site, *factors[0]):
        return q, k, None
    keys, queries = set(site.keys), set(site.queries)
    kv = {*site.batch, *site.kv_heads, *site.keys}
    for leaf, apply in factors:
        if not leaf.axes() & keys:
            factor = aligned(emitter, leaf, (site.batch, site.heads, site.queries, ()))
            q = cast(emitter, emitter.function(apply, q, factor), site.dtype)
        elif leaf.axes() <= kv and not leaf.axes() & queries:
            factor = aligned(emitter, leaf, (site.batch, site.kv_heads, site.keys, ()))
            k = cast(emitter, emitter.function(apply, k, factor), site.dtype)
        else:
            raise Refused("the scores are multiplied by a tensor that varies over queries and keys")
    return q, k, scores.scale


def _is_default_scale(site: AttentionSite, leaf: Leaf, apply) -> bool:
    """Whether a symbolic factor is 1/sqrt(head_dim), head_dim being a symbol."""
    x = leaf.value.tensor if isinstance(leaf.value, Value) else None
    if not isinstance(x, torch.SymFloat) or len(site.head_dim) != 1:
        return False
    size = site.head_dim[0].size
    root = torch.sym_sqrt(size)
    wanted = root if apply is operator.truediv else 1.0 / root
    power = size**0.5 if apply is operator.truediv else size**-0.5
    return any(
        isinstance(w, torch.SymFloat) and x.node.expr == w.node.expr for w in (wanted, power)
    )


def _restride(emitter: Emitter, node: fx.Node, original: fx.Node) -> fx.Node:
    """Keep the strides that a later operation or the caller could see."""
    made, wanted = example(node), example(original)
    if _same_strides(made, wanted) or _strides_unseen(original, made):
        return node
    if _is_contiguous(wanted):
        return emitter.method("contiguous", node)
    order = sorted(range(wanted.dim()), key=lambda i: -_hint(wanted.stride(i)))
    back = [order.index(i) for i in range(len(order))]
    node = emitter.method("permute", node, *order)
    node = emitter.method("contiguous", node)
    return emitter.method("permute", node, *back)


def _is_contiguous(t: Tensor) -> bool:
    """Without the guards that asking the tensor would add."""
    step: Size = 1
    for n, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if not same(stride, step) and not is_one(n):
            return False
        step = step * n
    return True


def _hint(stride: object) -> int:
    return stride.node.hint if isinstance(stride, torch.SymInt) else int(stride)


def _strides_unseen(node: fx.Node, made: Tensor) -> bool:
    """Whether only a chain of permutations reads the result and ends where other strides make no
    difference.
    """
    while len(node.users) == 1:
        (user,) = node.users
        name, _, writes = vocabulary.call(user)
        raw = vocabulary.raw_name(user)
        if writes or user.op not in ("call_method", "call_function"):
            return False
        if raw in ("contiguous", "linear", "matmul", "bmm"):
            return True
        if name not in ("permute", "reshape") or user.args[:1] != (node,):
            return False
        try:
            args = map_arg(user.args[1:], example)
            made = getattr(made, raw)(*args, **map_arg(user.kwargs, example))
        except (RuntimeError, ValueError, AttributeError, TypeError):  # `view` of what has gaps
            return False
        if name == "reshape":
            return _same_strides(made, example(user))
        node = user
    return False


def _same_strides(a: Tensor, b: Tensor) -> bool:
    return all(same(m, n) for m, n in zip(a.stride(), b.stride(), strict=True))


def _check_result(made: Tensor, wanted: Tensor) -> None:
    shape = all(same(a, b) for a, b in zip(made.shape, wanted.shape, strict=True))
    if not shape or made.dtype != wanted.dtype:
        raise Refused(
            f"the call would give {tuple(made.shape)} {made.dtype}, "
            f"not {tuple(wanted.shape)} {wanted.dtype}"
        )


def _doomed(site: AttentionSite) -> set[fx.Node]:
    """The path, and what hangs on it besides the result: readers of a shape."""
    doomed: set[fx.Node] = set()
    path = {value.node for value in site.core.path}
    sums = {row.path[-1].node for row in site.sums}
    pending = [*path, *sums]
    while pending:
        node = pending.pop()
        if node not in doomed and node is not site.core.out.node:
            doomed.add(node)
            pending += (n for n in node.users if node not in sums or n in path)
    return doomed


def _erase(doomed: set[fx.Node], view: View) -> None:
    """Remove the nodes that were replaced, and what fed only them and has no other effect."""
    gone: set[fx.Node] = set()
    feeding: list[fx.Node] = []
    for node in sorted(doomed, key=lambda n: view.values[n].index, reverse=True):
        feeding += _remove(node, view, gone)
    while feeding:
        node = feeding.pop()
        value = view.values.get(node)
        if node not in gone and not node.users and value and value.op in PURE and not value.writes:
            feeding += _remove(node, view, gone)


def _remove(node: fx.Node, view: View, gone: set[fx.Node]) -> list[fx.Node]:
    inputs = node.all_input_nodes
    view.graph.erase_node(node)
    gone.add(node)
    return inputs
