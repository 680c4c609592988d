"""Writing a plan into the graph as one call of torch.ops.fa.attention."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch.fx.node import map_arg

import fa_ops  # noqa: F401  defines torch.ops.fa
from compile_passes import constants, elements, layout, vocabulary
from compile_passes.axes import Dims, Size, is_one, same
from compile_passes.emit import Emitter, rows_are_contiguous
from compile_passes.ir import Value, View, example
from compile_passes.masks import Dead, Keep, Masks
from compile_passes.plan import Plan, Refused
from compile_passes.ranges import limits
from compile_passes.report import log
from compile_passes.states import Bias, Fill, Leaf
from compile_passes.verify import Unverified, difference

# Operations without effect besides their result.
PURE = (
    layout.LAYOUT
    | elements.HANDLERS.keys()
    | constants.FILLED.keys()
    | {"repeat_interleave", "div", "full", "bernoulli", "rand", "rand_like", "size"}
)
ATTENTION = torch.ops.fa.attention.default


def rewrite(plan: Plan, masks: Masks, view: View, verify: bool = False) -> fx.Node:
    """Replace the core's nodes. Raises Refused, with the graph unchanged, where that can't be
    done, or where with `verify` the numbers differ.
    """
    out = plan.core.out.node
    leaves = [plan.q, plan.k, plan.v, *_outside(plan)]
    leaves += [t.leaf for t in (*masks.biases, *masks.keeps) if t.leaf not in leaves]
    for leaf in leaves:
        if not view.intact(leaf.value, plan.core.out):
            raise Refused(f"{leaf.value.node.name} is written to before the value product")
    emitter = Emitter(view.graph, out, [x for x in leaves if isinstance(x.value.tensor, Tensor)])
    try:
        call, result = _emit(plan, masks, emitter, view)
        _check_result(example(result), example(out))
        doomed = _doomed(plan)
        if doomed & {n for made in emitter.made for n in made.all_input_nodes}:
            raise Refused("what joins the scores is made with their shape")
        if verify:
            _verify(plan, view, emitter, result)
    except BaseException:
        emitter.undo()
        raise
    out.replace_all_uses_with(result)
    _erase({*doomed, out}, view)
    plan.core.out.node = result  # other cores may read it
    return call


def _verify(plan: Plan, view: View, emitter: Emitter, new: fx.Node) -> None:
    if plan.core.weights.dropout_p:
        return  # two draws differ
    inputs = {leaf.value.node for leaf in (plan.q, plan.k, plan.v)}
    made = set(emitter.made)

    def runs(node: fx.Node) -> bool:
        name = vocabulary.call(node)[0]
        return node in made or name in PURE or name in ("tensor", "scalar_tensor")

    try:
        found = difference(view, plan.core.out.node, new, inputs, runs)
    except Unverified as failure:
        counters["fa_ops"]["not verified"] += 1
        log.warning("a rewrite could not be verified: %s", failure)
        return
    if found:
        raise Refused(f"verification failed, please report: {found}")
    counters["fa_ops"]["verified"] += 1


def _outside(plan: Plan) -> list[Leaf]:
    """Every leaf besides query, key and value."""
    scores = plan.scores
    found = [*scores.factors, *scores.divisors, *plan.core.weights.factors]
    found += [t.leaf for t in scores.terms if isinstance(t, Bias)]
    found += [t.mask for t in scores.terms if isinstance(t, Fill)]
    found += [scores.column] if scores.column else []
    return [leaf for leaf in found if isinstance(leaf.value, Value)]


def _emit(plan: Plan, masks: Masks, emitter: Emitter, view: View) -> tuple[fx.Node, fx.Node]:
    rows = (plan.batch, plan.heads, plan.queries)
    columns = (plan.batch, plan.kv_heads, plan.keys)
    q = _operand(emitter, plan.q, (*rows, plan.head_dim), plan.dtype)
    k = _operand(emitter, plan.k, (*columns, plan.head_dim), plan.dtype)
    v = _operand(emitter, plan.v, (*columns, plan.features), plan.dtype)
    q, k, scale = _scale(plan, emitter, q, k)
    options: dict[str, object] = {} if scale is None else {"scale": scale}
    dead = None
    if masks.run:
        found, dead = limits(plan, masks.run, view, emitter, q, masks.dead is not Dead.ZERO)
        options |= found
    passing, (mask, q, dead) = q, _mask(plan, masks, emitter, q, dead)
    learned = [_bias(plan, emitter, t) for t in masks.biases if _learns(t)]
    if masks.zeroed:
        k, mask = _zeroed_keys(plan, masks.zeroed, emitter, k)
    if plan.scores.softcap:
        options["softcap"] = plan.scores.softcap
    causal = masks.right == 0
    if masks.left is not None:
        options["window_left"] = masks.left
    if masks.right is not None and not causal:
        options["window_right"] = masks.right
    if plan.sunk:
        options["sinks"] = _sinks(plan, emitter, q)
    p = plan.core.weights.dropout_p
    if p:
        device = example(q).device
        options["dropout_seed"] = emitter.function(
            torch.randint, 0, 2**62, (1,), dtype=torch.int64, device=device
        )
    if scale is not None and scale < 0:  # kernels may take the maximum before they scale
        q, scale = emitter.function(operator.neg, q), -scale
        options["scale"] = scale
    q, k, v = (_with_rows(emitter, x) for x in (q, k, v))
    call = emitter.function(ATTENTION, q, k, v, mask, p, causal, **options)
    result = call
    if masks.dead is Dead.ABSORBED:
        result = _through_absorbed(
            plan, masks, emitter, result, passing, k, v, scale, dead, learned
        )
    gain = plan.core.weights.gain
    if not math.isclose(gain, 1.0, rel_tol=1e-9):
        result = emitter.function(operator.mul, result, gain)
    for leaf in plan.core.weights.factors:
        factor = _aligned(emitter, leaf, (*rows, ()))
        result = emitter.function(operator.mul, result, factor)
    result = _cast(emitter, result, plan.dtype)
    result = emitter.arrange(result, plan.out_dims, plan.core.dims)
    return call, _restride(emitter, result, plan.core.out.node)


def _operand(emitter: Emitter, leaf: Leaf, dims: Dims, dtype: torch.dtype) -> fx.Node:
    node = emitter.arrange(leaf.value.node, leaf.dims, dims, full=True)
    return _cast(emitter, node, dtype)


def _cast(emitter: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if example(node).dtype == dtype else emitter.method("to", node, dtype)


def _with_rows(emitter: Emitter, node: fx.Node) -> fx.Node:
    return node if rows_are_contiguous(node) else emitter.method("contiguous", node)


def _aligned(emitter: Emitter, leaf: Leaf, dims: Dims) -> fx.Node | float:
    """A leaf as a tensor that broadcasts against `dims`."""
    if not isinstance(leaf.value, Value):
        return leaf.value
    if not isinstance(leaf.value.tensor, Tensor) or not leaf.axes():
        return leaf.value.node if not leaf.dims else _scalar_tensor(emitter, leaf)
    return emitter.arrange(leaf.value.node, leaf.dims, dims)


def _scalar_tensor(emitter: Emitter, leaf: Leaf) -> fx.Node:
    return emitter.method("reshape", leaf.value.node, ())


def _scale(plan: Plan, emitter: Emitter, q: fx.Node, k: fx.Node):
    """Constant factors become the operator's scale; tensors and symbolic numbers multiply the
    query, or the key.
    """
    scores = plan.scores
    factors = [(x, operator.mul) for x in scores.factors]
    factors += [(x, operator.truediv) for x in scores.divisors]
    plain = len(factors) == 1 and scores.scale == 1.0 and not scores.softcap
    if plain and _is_default_scale(plan, *factors[0]):
        return q, k, None
    keys, queries = set(plan.keys), set(plan.queries)
    kv = {*plan.batch, *plan.kv_heads, *plan.keys}
    for leaf, apply in factors:
        if not leaf.axes() & keys:
            factor = _aligned(emitter, leaf, (plan.batch, plan.heads, plan.queries, ()))
            q = _cast(emitter, emitter.function(apply, q, factor), plan.dtype)
        elif leaf.axes() <= kv and not leaf.axes() & queries:
            factor = _aligned(emitter, leaf, (plan.batch, plan.kv_heads, plan.keys, ()))
            k = _cast(emitter, emitter.function(apply, k, factor), plan.dtype)
        else:
            raise Refused("the scores are multiplied by a tensor that varies over queries and keys")
    return q, k, scores.scale


def _is_default_scale(plan: Plan, leaf: Leaf, apply) -> bool:
    """Whether a symbolic factor is 1/sqrt(head_dim), head_dim being a symbol."""
    x = leaf.value.tensor if isinstance(leaf.value, Value) else None
    if not isinstance(x, torch.SymFloat) or len(plan.head_dim) != 1:
        return False
    size = plan.head_dim[0].size
    root = torch.sym_sqrt(size)
    wanted = root if apply is operator.truediv else 1.0 / root
    power = size**0.5 if apply is operator.truediv else size**-0.5
    return any(
        isinstance(w, torch.SymFloat) and x.node.expr == w.node.expr for w in (wanted, power)
    )


def _mask(plan: Plan, masks: Masks, emitter: Emitter, q: fx.Node, dead: fx.Node | None):
    """(attn_mask, query, dead rows): biases added up, masks joined, rows without keys given all."""
    keep = bias = None
    for one in masks.keeps:
        mask = _keep(plan, emitter, one)
        keep = mask if keep is None else emitter.function(operator.and_, keep, mask)
    if masks.opaque:
        dead = _filled_rows(plan, emitter, masks.opaque)
    elif masks.dead is not Dead.ZERO and dead is None:
        alive = emitter.method("any", keep, dim=-1, keepdim=True)
        dead = emitter.function(torch.logical_not, alive)
        keep = emitter.function(operator.or_, keep, dead)
    if masks.dead not in (Dead.ZERO, Dead.ADDED):
        q = emitter.method("masked_fill", q, dead, 0.0)
    for term in masks.biases:
        one = _bias(plan, emitter, term)
        bias = one if bias is None else emitter.function(operator.add, bias, one)
    if masks.added:
        one = _added(plan, emitter, masks.added)
        bias = one if bias is None else emitter.function(operator.add, bias, one)
    if bias is None:
        return keep, q, dead
    if example(bias).dtype not in (plan.dtype, torch.float32):
        bias = emitter.method("to", bias, torch.float32)
    if dead is not None:
        bias = emitter.method("masked_fill", bias, dead, 0.0)
    if keep is not None:
        drop = emitter.function(torch.logical_not, keep)
        bias = emitter.method("masked_fill", bias, drop, -math.inf)
    return bias, q, dead


def _filled_rows(plan: Plan, emitter: Emitter, term: Bias) -> fx.Node:
    """Rows of a bias that are one finite number beside which real scores vanish."""
    bias = _bias(plan, emitter, term)
    ends = [emitter.method(name, bias, dim=-1, keepdim=True) for name in ("amax", "amin")]
    level = emitter.function(operator.eq, *ends)
    info = torch.finfo(term.dtype)
    low = emitter.function(operator.le, ends[0], -64 / info.eps)
    finite = emitter.function(operator.ge, ends[0], info.min)
    return emitter.function(operator.and_, emitter.function(operator.and_, level, low), finite)


def _added(plan: Plan, emitter: Emitter, fill: Fill) -> fx.Node:
    """A fill as a bias."""
    mask = emitter.arrange(fill.mask.value.node, fill.mask.dims, plan.mask_dims)
    if not fill.where:
        mask = emitter.function(torch.logical_not, mask)
    mask = emitter.method("to", mask, torch.float32)
    return emitter.function(operator.mul, mask, fill.value)


def _zeroed_keys(plan: Plan, fill: Fill, emitter: Emitter, k: fx.Node):
    """(key, attn_mask) for scores that one small number replaces, whatever the query."""
    dims = (plan.batch, plan.kv_heads, plan.keys, ())
    mask = emitter.arrange(fill.mask.value.node, fill.mask.dims, dims)
    if not fill.where:
        mask = emitter.function(torch.logical_not, mask)
    k = emitter.method("masked_fill", k, mask, 0.0)
    full = emitter.arrange(fill.mask.value.node, fill.mask.dims, plan.mask_dims)
    bias = emitter.method("to", full, torch.float32)
    if fill.where:
        return k, emitter.function(operator.mul, bias, fill.value)
    one_minus = emitter.function(operator.sub, 1.0, bias)
    return k, emitter.function(operator.mul, one_minus, fill.value)


def _sinks(plan: Plan, emitter: Emitter, q: fx.Node) -> fx.Node:
    """One logit per query head."""
    column = plan.scores.column
    if column is None:
        heads = emitter.method("size", q, 1)
        return emitter.method("new_zeros", q, (heads,), dtype=torch.float32)
    if not column.axes() <= set(plan.heads):
        raise Refused("the sink is not one number per head")
    sinks = emitter.arrange(column.value.node, column.dims, (plan.heads,), full=True)
    allowed = (plan.dtype, torch.float32)
    return sinks if example(sinks).dtype in allowed else _cast(emitter, sinks, torch.float32)


def _keep(plan: Plan, emitter: Emitter, keep: Keep) -> fx.Node:
    mask = emitter.arrange(keep.leaf.value.node, keep.leaf.dims, plan.mask_dims)
    if keep.kept is True:
        return mask
    if keep.kept is False:
        return emitter.function(torch.logical_not, mask)
    return emitter.function(operator.eq, mask, keep.kept)


def _learns(term: Bias) -> bool:
    """Whether a bias has a gradient that differs from key to key."""
    leaf = term.leaf
    return isinstance(leaf.value, Value) and leaf.value.tensor.requires_grad


def _through_absorbed(
    plan: Plan, masks: Masks, emitter: Emitter, result, q, k, v, scale, dead, biases
) -> fx.Node:
    """Add what a dead row passes back to its scores when they vanish beside the fill: nothing
    forward, all of it backward.

    With uniform weights over n keys, d out = sum_j (v_j - mean v) ds_j / n: linear in the query.
    """
    operands = (plan.q.value.node, plan.k.value.node, *biases)
    if not any(example(x).requires_grad for x in operands):
        return result
    if masks.opaque and scale is None:
        return result
    if plan.scores.softcap or scale is None:
        raise Refused("rows without keys pass gradients through a softcap or a symbolic scale")
    centred = emitter.function(operator.sub, v, emitter.method("mean", v, 2, keepdim=True))
    centred = emitter.method("transpose", emitter.method("detach", centred), 2, 3)
    slope = emitter.method("transpose", emitter.function(torch.matmul, centred, k), 2, 3)
    groups = _group_size(plan, emitter, q, k)
    grouped = q if groups == 1 else _fold(emitter, q, groups)
    linear = emitter.function(torch.matmul, grouped, slope)
    if groups != 1:
        linear = _unfold(emitter, linear, groups)
    linear = emitter.function(operator.mul, linear, scale)
    for bias in biases:
        if not is_one(example(bias).shape[-1]):  # else it is common to a row
            wide = emitter.method("transpose", centred, 2, 3)
            if groups != 1:
                wide = emitter.method("repeat_interleave", wide, groups, 1)
            added = emitter.function(torch.matmul, _cast(emitter, bias, plan.dtype), wide)
            linear = emitter.function(operator.add, linear, added)
    n = emitter.method("size", k, 2)
    linear = emitter.function(operator.truediv, linear, n)
    if masks.share != 1.0:
        linear = emitter.function(operator.mul, linear, masks.share)
    only_backward = emitter.function(operator.sub, linear, emitter.method("detach", linear))
    alive = emitter.function(torch.logical_not, dead)
    return emitter.function(
        operator.add, result, emitter.method("masked_fill", only_backward, alive, 0.0)
    )


def _group_size(plan: Plan, emitter: Emitter, q: fx.Node, k: fx.Node) -> int | fx.Node:
    """Query heads per key head."""
    size = math.prod(a.size for a in plan.heads[len(plan.kv_heads) :])
    if type(size) is int:
        return size
    heads = (emitter.method("size", x, 1) for x in (q, k))
    return emitter.function(operator.floordiv, *heads)


def _fold(emitter: Emitter, x: fx.Node, groups: int | fx.Node) -> fx.Node:
    """(B, Hkv * groups, S, D) to (B, Hkv, groups * S, D)"""
    return emitter.method("flatten", emitter.method("unflatten", x, 1, (-1, groups)), 2, 3)


def _unfold(emitter: Emitter, x: fx.Node, groups: int | fx.Node) -> fx.Node:
    return emitter.method("flatten", emitter.method("unflatten", x, 2, (groups, -1)), 1, 2)


def _bias(plan: Plan, emitter: Emitter, term: Bias) -> fx.Node:
    node = _aligned(emitter, term.leaf, plan.mask_dims)
    if not isinstance(term.leaf.value.tensor, Tensor):
        raise Refused("a symbolic number is added to the scores")
    if not example(node).dtype.is_floating_point:
        node = emitter.method("to", node, torch.float32)
    if term.coefficient != 1.0:
        node = emitter.function(operator.mul, node, term.coefficient)
    return node


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
        except (RuntimeError, AttributeError, TypeError):  # `view` of what is not contiguous
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


def _doomed(plan: Plan) -> set[fx.Node]:
    """The path, and what hangs on it besides the result: readers of a shape."""
    doomed: set[fx.Node] = set()
    pending = [value.node for value in plan.core.path]
    while pending:
        node = pending.pop()
        if node not in doomed and node is not plan.core.out.node:
            doomed.add(node)
            pending += node.users
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
