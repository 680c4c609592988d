"""The replacement of a match: which operator is called, with which arguments and results, and its
verification on random inputs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Callable, Collection

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.node import map_arg

import fa_ops  # noqa: F401  defines torch.ops.fa
from compile_passes.emit import masks as mask_nodes
from compile_passes.emit.emitter import (
    Emitter,
    aligned,
    bool_mask,
    cast,
    contiguous_rows,
    inverted,
    only_backward,
    operand,
)
from compile_passes.emit.masks import (
    MaskNodes,
    biases_require_grad,
    emit_conditions,
    emit_key_interval,
)
from compile_passes.ir import constants, vocabulary
from compile_passes.ir.axes import Group, is_one, sizes_equal
from compile_passes.ir.graph import (
    GraphView,
    Value,
    example,
    hint,
    memory_order,
    requires_grad,
    restride,
    run,
)
from compile_passes.masks import symbolic_evaluator
from compile_passes.masks.mask_terms import ClassifiedMasks, EmptyRows
from compile_passes.match.attention_site import AttentionSite
from compile_passes.match.states import BiasTerm, FillTerm, Leaf
from compile_passes.report import Refusal, log
from fa_ops.call.options import MAX_DECODING_QUERIES, MAX_QUANTIZED_HEAD_DIM

# The call where finite fills that absorb the scores may mask all keys of a row.
#
# Beside a fill such as finfo.min real scores vanish: the row averages its keys, yet its gradient
# reaches every score. `fa::attention_averaging_rows` computes both.

AVERAGING = torch.ops.fa.attention_averaging_rows.default


def has_averaging_rows(site: AttentionSite, masks: ClassifiedMasks) -> bool:
    """Whether rows that average their keys have a gradient that reaches their scores."""
    if masks.empty_rows is not EmptyRows.ABSORBED:
        return False
    of_products = requires_grad(site.q.value) or requires_grad(site.k.value)
    return of_products or biases_require_grad(masks)


def averaging_options(emitter: Emitter, masks: ClassifiedMasks, emitted: MaskNodes) -> dict:
    """The arguments of the call in addition to the options of attention."""
    rows = emitter.method("squeeze", emitted.empty_rows, -1)
    options: dict[str, object] = {"averaging_rows": rows}
    if emitted.filled is not None:
        options["filled_keys"] = emitted.filled
    if masks.grad_share != 1.0:
        options["grad_share"] = masks.grad_share
    return options


def with_lse_gradients(
    emitter: Emitter, emitted: MaskNodes, k: fx.Node, given: fx.Node, lse: fx.Node
) -> fx.Node:
    """`lse`, that of eager mode, with the gradient of `given`, the operator's, in empty rows. There
    eager mode sums n gradients: beside the fill its log-sum-exp cannot hold log n.
    """
    empty = emitter.method("squeeze", emitted.empty_rows, -1)
    other = emitter.method("logical_not", empty)
    given = emitter.method("masked_fill", given, other, 0.0)
    given = emitter.function(operator.mul, given, _key_count(emitter, emitted, k))
    return emitter.function(operator.add, lse, only_backward(emitter, given))


def _key_count(emitter: Emitter, emitted: MaskNodes, k: fx.Node) -> fx.Node:
    """The number of keys that an empty row averages."""
    if emitted.averaged is None or is_one(example(emitted.averaged).shape[-1]):
        return emitter.method("size", k, 2)
    return emitter.method("sum", emitted.averaged, -1)


# Replacing an attention by one call of torch.ops.fa.attention: its nodes are emitted, checked and
# put in the place of the original, which is erased.

# Operations that do nothing but compute their result.
PURE = (
    vocabulary.LAYOUT
    | symbolic_evaluator.RULES.keys()
    | constants.FILLS.keys()
    | {"repeat_interleave", "div", "full", "bernoulli", "rand", "rand_like", "size"}
)
ATTENTION = torch.ops.fa.attention.default
WITH_LSE = torch.ops.fa.attention_with_lse.default


def rewrite(
    site: AttentionSite, masks: ClassifiedMasks, view: GraphView, verify: bool = False,
    quantizes: bool = False,
) -> tuple[fx.Node, bool]:  # fmt: skip
    """Replace an attention. Raises Refusal, with the graph unchanged, where that is not
    possible, or where with `verify` the numbers differ. A call that `quantizes` has 8-bit products,
    and is not compared.

    Returns:
        The call, and whether it was compared with what it replaces.
    """
    leaves = [site.q, site.k, site.v, *_other_leaves(site)]
    leaves += [leaf for leaf in masks.leaves if leaf not in leaves]
    _check_leaves(leaves, site, view)
    out = site.core.out.node
    emitter = Emitter(view.graph, site, leaves)
    try:
        call, replaced = _emit_call(emitter, masks, view, quantizes)
        for old, new in replaced.items():
            _check_result(example(new), example(old))
        erased = _nodes_to_erase(site)
        if erased & emitter.inputs():
            raise Refusal("an operand of the scores depends on their shape")
        late = mask_nodes.lse_readers(emitter, view, erased)
        verified = verify and not quantizes
        verified = verified and all(_verified(emitter, view, *pair) for pair in replaced.items())
    except BaseException:
        emitter.undo()
        raise
    for node in reversed(late):
        out.append(node)
    for old, new in replaced.items():
        old.replace_all_uses_with(new, lambda user: user not in erased)
    _erase({*erased, out}, view)
    for value in (site.core.out, *(row.path[-1] for row in site.lses)):
        value.node = replaced[value.node]  # other cores may read it
    return call, verified


def _other_leaves(site: AttentionSite) -> list[Leaf]:
    """Every leaf but query, key and value."""
    scores = site.scores
    weights = site.core.weights
    found = [*scores.factors, *scores.divisors, *weights.factors, *weights.gate_leaves()]
    found += [t.leaf for t in scores.terms if isinstance(t, BiasTerm)]
    found += [t.mask for t in scores.terms if isinstance(t, FillTerm)]
    found += [t.mask for t in weights.row_fills]
    found += [scores.sink] if scores.sink else []
    return [leaf for leaf in found if isinstance(leaf.value, Value)]


def _check_leaves(leaves: list[Leaf], site: AttentionSite, view: GraphView) -> None:
    """Raises Refusal where an input is no plain tensor, or changes before the value product."""
    for leaf in leaves:
        tensor = leaf.value.tensor
        if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
            raise Refusal(f"{leaf.value.node.name} is not a plain tensor: {type(tensor).__name__}")
        if not view.is_unmodified(leaf.value, site.core.out):
            raise Refusal(f"{leaf.value.node.name} is written to before the value product")


def _check_result(result: Tensor, wanted: Tensor) -> None:
    """Raises Refusal where a replacement has another shape or dtype."""
    shape = all(sizes_equal(a, b) for a, b in zip(result.shape, wanted.shape, strict=True))
    if not shape or result.dtype != wanted.dtype:
        raise Refusal(
            f"the call would return {tuple(result.shape)} {result.dtype}, "
            f"not {tuple(wanted.shape)} {wanted.dtype}"
        )


def _verified(emitter: Emitter, view: GraphView, old: fx.Node, new: fx.Node) -> bool:
    """Whether the two were compared. Raises Refusal where the replacement gives other numbers."""
    site = emitter.site
    if site.core.weights.dropout_p:
        return False  # the two draw other masks
    operands = (site.q.value, site.k.value, site.v.value)
    inputs = {value.node for value in operands if not value.writes}
    emitted = set(emitter.nodes)

    def runs(node: fx.Node) -> bool:
        name = vocabulary.operation(node)[0]
        return node in emitted or name in PURE or name in ("tensor", "scalar_tensor")

    try:
        found = difference(view.graph, old, new, inputs, runs)
    except Unverified as failure:
        counters["fa_ops"]["not verified"] += 1
        log.warning("a rewrite could not be verified: %s", failure)
        return False
    if found:
        raise Refusal(f"verification failed, please report: {found}")
    counters["fa_ops"]["verified"] += 1
    return True


def _emit_call(
    emitter: Emitter, masks: ClassifiedMasks, view: GraphView, quantizes: bool
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """(the call, the replacement of each node that the model reads)"""
    site = emitter.site
    if site.lses:
        mask_nodes.check_lse(site, masks)
    q = operand(emitter, site.q, (*site.row_dims, site.head_dim), site.dtype)
    k = operand(emitter, site.k, (*site.key_dims, site.head_dim), site.dtype)
    v = _gated_value(emitter)
    q, k, scale = _scale(emitter, q, k)
    if scale is not None and scale < 0:  # kernels may take the maximum before they scale
        q, scale = emitter.function(operator.neg, q), -scale
    options: dict[str, object] = {} if scale is None else {"scale": scale}
    empty_rows = None
    if masks.interval:
        keys, empty_rows = emit_key_interval(emitter, view, masks, q)
        options |= keys
    conditions = emit_conditions(emitter, view, masks)
    averaging = has_averaging_rows(site, masks)
    emitted = mask_nodes.emit_masks(emitter, masks, q, empty_rows, conditions, averaging)
    mask = emitted.mask
    if masks.zeroed_keys:
        k, mask = mask_nodes.zeroed_keys(emitter, masks.zeroed_keys, k)
    options |= _scalar_options(emitter, masks, q)
    separate = mask_nodes.needs_separate_sink(site, masks)
    sink = mask_nodes.emit_sink(emitter, q, separate) if site.has_sink else None
    if site.has_sink and not separate:
        options["sinks"] = sink
    dropout_p = site.core.weights.dropout_p
    query, k, v = (contiguous_rows(emitter, x) for x in (emitted.query, k, v))
    causal, needs_lse = masks.right == 0, bool(site.lses or separate)
    target = WITH_LSE if needs_lse else ATTENTION
    if averaging:
        target = AVERAGING
        options |= averaging_options(emitter, masks, emitted)
    arguments = query, k, v, mask, dropout_p, causal
    if quantizes:
        call = result = quantized_call(emitter, arguments, options)
    else:
        call = result = emitter.function(target, *arguments, **options)
    lse = None
    if target is not ATTENTION or quantizes:
        result, given = (emitter.function(operator.getitem, call, i) for i in (0, 1))
        lse = mask_nodes.eager_lse(emitter, masks, emitted, given) if needs_lse else None
    if site.lses and averaging:
        lse = with_lse_gradients(emitter, emitted, k, given, lse)
    if separate:
        result = mask_nodes.scale_by_sink(emitter, result, lse, sink)
    out = site.core.out.node
    replaced = {out: restride(emitter, _restore_layout(emitter, result), out)}
    for old, new in mask_nodes.replaced_lses(emitter, lse).items():
        replaced[old] = restride(emitter, new, old)
    return call, replaced


def _gated_value(emitter: Emitter) -> fx.Node:
    """The value, times the factors of the weights that vary along the keys."""
    site = emitter.site
    v = operand(emitter, site.v, (*site.key_dims, site.features), site.dtype)
    for gate in site.core.weights.gates:
        if isinstance(gate, FillTerm):
            mask = bool_mask(emitter, gate.mask, (*site.key_dims, ()))
            v = emitter.method(
                "masked_fill", v, mask if gate.where else inverted(emitter, mask), 0.0
            )
        else:
            apply = operator.truediv if gate.divides else operator.mul
            factor = aligned(emitter, gate.leaf, (*site.key_dims, ()))
            v = cast(emitter, emitter.function(apply, v, factor), site.dtype)
    return v


def _scalar_options(emitter: Emitter, masks: ClassifiedMasks, q: fx.Node) -> dict[str, object]:
    """The options that are not masks, and the seed of a dropout."""
    site = emitter.site
    options: dict[str, object] = {}
    if site.scores.softcap:
        options["softcap"] = site.scores.softcap
    if masks.left is not None:
        options["window_left"] = masks.left
    if masks.right not in (None, 0):
        options["window_right"] = masks.right
    if masks.alibi:
        slopes, factor = masks.alibi
        node = operand(emitter, slopes, (site.heads,), torch.float32)
        options["alibi_slopes"] = (
            node if factor == 1.0 else emitter.function(operator.mul, node, factor)
        )
    if site.core.weights.dropout_p:
        # a tensor of its own: torch merges equal calls of operators, except those of empty
        like = emitter.function(torch.empty, 0, device=example(q).device)
        options["dropout_seed"] = emitter.function(torch.ops.fa.dropout_seed.default, like)
    return options


def _restore_layout(emitter: Emitter, result: fx.Node) -> fx.Node:
    """The result times the factors of the weights, with 0 in rows whose weights were filled, in
    the dims of the original.
    """
    site = emitter.site
    gain = site.core.weights.gain
    if not math.isclose(gain, 1.0, rel_tol=1e-9):
        result = emitter.function(operator.mul, result, gain)
    for leaf in site.core.weights.factors:
        factor = aligned(emitter, leaf, (*site.row_dims, ()))
        result = emitter.function(operator.mul, result, factor)
    for fill in site.core.weights.row_fills:
        mask = bool_mask(emitter, fill.mask, (*site.row_dims, ()))
        mask = mask if fill.where else inverted(emitter, mask)
        result = emitter.method("masked_fill", result, mask, 0.0)
    result = cast(emitter, result, site.dtype)
    return emitter.arrange(result, site.out_dims, site.core.dims)


def _scale(emitter: Emitter, q: fx.Node, k: fx.Node) -> tuple[fx.Node, fx.Node, float | None]:
    """(query, key, the operator's scale): constant factors become the scale; tensors and symbolic
    numbers multiply the query or the key.
    """
    site, scores = emitter.site, emitter.site.scores
    factors = [(x, operator.mul) for x in scores.factors]
    factors += [(x, operator.truediv) for x in scores.divisors]
    alone = len(factors) == 1 and scores.scale == 1.0 and not scores.softcap
    if alone and _is_default_scale(site, *factors[0]):
        return q, k, None
    keys, queries = set(site.keys), set(site.queries)
    for leaf, apply in factors:
        if not leaf.axes() & keys:
            factor = aligned(emitter, leaf, (*site.row_dims, ()))
            q = cast(emitter, emitter.function(apply, q, factor), site.dtype)
        elif leaf.axes() <= {*site.batch, *site.kv_heads, *keys} - queries:
            factor = aligned(emitter, leaf, (*site.key_dims, ()))
            k = cast(emitter, emitter.function(apply, k, factor), site.dtype)
        else:
            raise Refusal("the scores are multiplied by a tensor that varies over queries and keys")
    return q, k, scores.scale


def _is_default_scale(site: AttentionSite, leaf: Leaf, apply) -> bool:
    """Whether a symbolic factor is 1/sqrt(head_dim), where head_dim is a symbol."""
    x = leaf.value.tensor if isinstance(leaf.value, Value) else None
    if not isinstance(x, torch.SymFloat) or len(site.head_dim) != 1:
        return False
    size = site.head_dim[0].size
    roots = (torch.sym_sqrt(size), size**0.5)
    if apply is operator.mul:
        roots = (1.0 / roots[0], size**-0.5)
    return any(isinstance(r, torch.SymFloat) and x.node.expr == r.node.expr for r in roots)


def _nodes_to_erase(site: AttentionSite) -> set[fx.Node]:
    """The path, and the readers of its shapes."""
    erased: set[fx.Node] = set()
    path = {value.node for value in site.core.path}
    lses = {row.path[-1].node for row in site.lses}
    pending = [*path, *lses]
    while pending:
        node = pending.pop()
        if node not in erased and node is not site.core.out.node:
            erased.add(node)
            pending += (n for n in node.users if node not in lses or n in path)
    return erased


def _erase(nodes: set[fx.Node], view: GraphView) -> None:
    """Erase the nodes that were replaced, and pure operations that only fed them."""
    erased: set[fx.Node] = set()
    inputs: list[fx.Node] = []

    def erase(node: fx.Node) -> None:
        inputs.extend(node.all_input_nodes)
        view.graph.erase_node(node)
        erased.add(node)

    for node in sorted(nodes, key=lambda n: view.values[n].index, reverse=True):
        erase(node)
    while inputs:
        node = inputs.pop()
        value = view.values.get(node)
        if (
            node not in erased
            and not node.users
            and value
            and value.op in PURE
            and not value.writes
        ):
            erase(node)


# The choice of 8-bit products, if they were asked for, and the call for them.

QUANTIZED = torch.ops.fa.quantized_attention.default
_DTYPES = torch.float16, torch.bfloat16, torch.float32
# `_modules['blocks']._modules['0']` and `getattr(blocks, '0')` of older releases, `L['self']`
_ATTRIBUTE = re.compile(r"\._modules\['(\w+)'\]|\['(\w+)'\]")
_GETATTR = re.compile(r"getattr\(([^()]*), '(\w+)'\)")


@dataclasses.dataclass(frozen=True)
class QuantizedProducts:
    """The option: attention of modules with these names keeps 16-bit products."""

    sixteen_bit: tuple[str, ...] = ()

    @classmethod
    def of(cls, eight_bit: bool, sixteen_bit: Collection[str]) -> QuantizedProducts | None:
        """The options among the arguments of `install`; None without 8-bit products.

        Raises TypeError and ValueError for arguments that are wrong.
        """
        if not isinstance(eight_bit, bool):
            raise TypeError(f"eight_bit must be a bool, got {eight_bit!r}")
        if isinstance(sixteen_bit, str) or not all(isinstance(x, str) and x for x in sixteen_bit):
            raise TypeError(f"sixteen_bit must hold names of modules, got {sixteen_bit!r}")
        if sixteen_bit and not eight_bit:
            raise ValueError(f"sixteen_bit must be empty without eight_bit, got {sixteen_bit!r}")
        return cls(tuple(sorted(sixteen_bit))) if eight_bit else None

    def refusal(self, site: AttentionSite, masks: ClassifiedMasks) -> str | None:
        """Why an attention keeps 16-bit products, or None."""
        if site.requires_grad:
            return "a gradient may be recorded"
        if site.core.weights.dropout_p:
            return "dropout"
        if masks.alibi:
            return "ALiBi"
        if masks.is_dense:
            return "a dense mask"
        if site.dtype not in _DTYPES:
            return str(site.dtype)
        sizes = _size(site.head_dim), _size(site.features)
        if site.q.value.tensor.is_cuda and max(sizes) > MAX_QUANTIZED_HEAD_DIM:
            return f"a head dimension above {MAX_QUANTIZED_HEAD_DIM}"
        queries, keys = _size(site.queries), _size(site.keys)
        if 0 < queries <= MAX_DECODING_QUERIES and not 0 < keys <= queries:
            return f"at most {MAX_DECODING_QUERIES} queries, for which all keys would be quantised"
        path = module_path(site.core.weights.softmax.node)
        name = next((name for name in self.sixteen_bit if _contains(path, name)), None)
        return f"sixteen_bit names {name}" if name else None


def _size(group: Group) -> int:
    """The number of elements of axes; 0 where it is not known."""
    total = 1
    for axis in group:
        total *= axis.size if type(axis.size) is int else 0
    return total


def module_path(node: fx.Node) -> str:
    """The name of the module that computes a node, after what the graph calls its root."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    while (shorter := _GETATTR.sub(r"\1.\2", path)) != path:
        path = shorter
    return _ATTRIBUTE.sub(lambda found: f".{found[1] or found[2]}", path)


def _contains(path: str, name: str) -> bool:
    """Whether the parts of a name are next to one another in a path."""
    return f".{name}." in f".{path}."


def quantized_call(emitter: Emitter, arguments: tuple, options: dict[str, object]) -> fx.Node:
    """The call with 8-bit products in place of one of attention; its results are out and lse."""
    *tensors, mask, _, is_causal = arguments
    assert mask is None
    return emitter.function(QUANTIZED, *tensors, None, None, None, is_causal, **options)


# Verification: the original and its replacement run on the same random inputs.
#
# They run with the example's shapes, and in fp64 unless the code fixes another dtype. Where they
# differ in fp64, in which -1e9 does not absorb scores, they run again in the dtypes of the code.
# The inputs are query, key and value, and the tensors that masks and biases are computed from by
# pure operations.

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
TOLERANCE_16_BIT = 5e-2


class Unverified(Exception):
    """The original and its replacement could not be run; the rewrite may be right."""


def difference(
    graph: fx.Graph, old: fx.Node, new: fx.Node, leaves: set[fx.Node], pure: Callable
) -> str:
    """A description of how two nodes or their gradients differ; empty if they agree.

    Raises Unverified where they can't be run. Where `old` is NaN or infinite, as in rows without
    keys, `new` may be anything.
    """
    nodes = _nodes_to_run(graph, old, new, leaves, pure)
    found, failure = "", None
    for dtype in (torch.float64, None):
        try:
            with unset_fake_temporarily(), torch.enable_grad(), torch.random.fork_rng():
                torch.manual_seed(0)
                found = _compare(nodes, old, new, leaves, dtype)
        except Exception as error:  # a fixed dtype, an index out of range, no memory
            failure = error
        else:
            if not found:
                return ""
    if found:
        return found
    raise Unverified(f"{type(failure).__name__}: {failure}") from failure


def _nodes_to_run(
    graph: fx.Graph, old: fx.Node, new: fx.Node, leaves: set[fx.Node], pure: Callable
) -> list[tuple[fx.Node, bool]]:
    """The nodes to run in graph order, each with whether it is an input."""
    wanted: dict[fx.Node, bool] = {}
    pending = [old, new]
    computable = _computable(graph, leaves)
    while pending:
        node = pending.pop()
        if node in wanted:
            continue
        runs = node not in leaves and (node in computable or pure(node))
        wanted[node] = not runs
        if runs:
            writers = [u for u in node.users if vocabulary.operation(u)[2]]
            pending += [*node.all_input_nodes, *(u for u in writers if u.args[:1] == (node,))]
    return [(node, wanted[node]) for node in graph.nodes if node in wanted]


def _computable(graph: fx.Graph, leaves: set[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on a leaf, or on no input of the graph."""
    dependent, constant = set(leaves), set()
    for node in graph.nodes:
        inputs, calls = node.all_input_nodes, node.op in ("call_function", "call_method")
        if not dependent.isdisjoint(inputs):
            dependent.add(node)
        elif calls and constant.issuperset(inputs):
            constant.add(node)
    return dependent | constant


def _compare(
    nodes: list, old: fx.Node, new: fx.Node, leaves: set[fx.Node], dtype: torch.dtype | None
) -> str:
    inputs = {n: _random(example(n), dtype, n in leaves) for n, given in nodes if given}
    results = [_run(nodes, inputs, node) for node in (old, new)]
    requires_grad = example(old).requires_grad
    for i, (a, b) in enumerate(itertools.zip_longest(*results)):
        if a is None or b is None:
            present = b if a is None else a
            if present is not None and present.any() and requires_grad:
                return "a gradient is missing"
            continue
        known = torch.isfinite(a)
        a, b = (torch.where(known, x, 0).double() for x in (a, b))
        error = (a - b).abs().max().item() if a.numel() else 0.0
        scale = max(1.0, a.abs().max().item()) if a.numel() else 1.0
        bound = scale * TOLERANCE.get(results[0][0].dtype, TOLERANCE_16_BIT)
        if not error <= bound and (i == 0 or requires_grad):
            name = "the result" if i == 0 else f"gradient {i}"
            return f"{name} differs by {error:.2g} where {bound:.2g} is allowed"
    return ""


def _run(nodes: list, inputs: dict[fx.Node, object], wanted: fx.Node) -> list[Tensor | None]:
    """The value of a node and its gradients. Random masks are the same in every run."""
    torch.manual_seed(1)
    values: dict[fx.Node, object] = {}
    require_grad = []
    for node, given in nodes:
        if not given:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = run(node.op, node.target, args, kwargs)
            continue
        x = inputs[node]
        if isinstance(x, Tensor) and x.is_floating_point() and example(node).requires_grad:
            x = x.detach().clone().requires_grad_()
            require_grad.append(x)
            x = x * 1.0  # in-place operations may follow
        values[node] = x.clone() if isinstance(x, Tensor) else x  # with the same strides
    out = values[wanted]
    if not require_grad or not out.requires_grad:
        return [out.detach()]
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    seed = torch.where(torch.isfinite(out).all(-1, keepdim=True), seed, 0)
    grads = torch.autograd.grad(out, require_grad, seed, allow_unused=True)
    return [out.detach(), *grads]


def _random(x: object, dtype: torch.dtype | None, leaf: bool) -> object:
    """A random value of the example's type, shape and memory order. Floats that are not query, key
    or value are 0 or 1, since masks are computed from them.
    """
    if isinstance(x, (SymInt, SymFloat, SymBool)):
        return x.node.hint
    if not isinstance(x, Tensor):
        return x
    shape = [hint(n) for n in x.shape]
    if x.dtype == torch.bool:
        return torch.rand(shape, device=x.device) > 0.3
    if not x.dtype.is_floating_point:
        return torch.randint(0, 2, shape, device=x.device, dtype=x.dtype)
    order, inverse = memory_order(x)
    drawn = torch.randn([shape[i] for i in order], device=x.device, dtype=torch.float64)
    drawn = drawn if leaf else (drawn > -0.5).double()
    return drawn.to(dtype or x.dtype).permute(inverse)
