"""Splits functions into what options of attention express, terms, and a program that reads them.

Of a score_mod and mask_mods, in this order:

1. Conditions that replace the score by -inf belong to the mask.
2. Conditions that bound the keys of each query by numbers of the query become a window or
   `key_ranges`.
3. What reads a tensor by query and key, and is added or a condition, becomes an `attn_mask`.
4. All else that depends on at most one index, or on the distance, and is no cheaper than reading
   it, becomes a term. The program is what is left.

What 2 to 4 need is computed before the kernel, by operations of torch (`Prologue`), of which
autograd gives the gradients of captured tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.programs.evaluation import evaluate
from fa_ops.programs.expressions import (
    BOOL,
    COLUMN,
    DENSE,
    DISTANCE,
    FLOAT,
    INT,
    ROW,
    TILE,
    Expressions,
    Linear,
    Node,
    dependencies,
    domains,
    linear_forms,
    literal,
    order,
)
from fa_ops.programs.program import BLOCKS, ScoreProgram, Term, padded

UNBOUNDED_KEY = 2**30  # behind all keys
_CHEAP = frozenset(("lt", "le", "eq", "and", "or", "not", "xor"))


class Split(NamedTuple):
    """A score_mod and mask_mods as options, tensors and a program."""

    expressions: Expressions
    window: tuple[int | None, int | None]  # keys to the left and right of the query's own index
    lower: Node | None  # the first key of each query
    upper: Node | None  # the key behind its last one
    dense_mask: Node | None  # bool
    bias: Node | None  # float, added
    program: ScoreProgram | None
    terms: tuple[Node, ...]  # of the program
    softcap: float  # with it and `slopes` no program is needed, where Sq == Sk
    slopes: Node | None
    name: str  # of the functions, in errors

    @property
    def has_options(self) -> bool:
        """Whether a soft cap or slopes of distances are all that the program computes."""
        return self.softcap > 0.0 or self.slopes is not None

    def by_program(self) -> Split:
        """The split with a program in any case, of which options are a part."""
        e = self.expressions
        return (
            self
            if self.program
            else self._replace(program=ScoreProgram((), None, e.argument("score"), e))
        )

    def lines(self) -> list[str]:
        """What `explain` says of it."""
        left, right = self.window
        found, shown = [], self.expressions.shown
        if self.window != (None, None):
            sides = ["all" if side is None else side for side in (left, right)]
            found.append("window: {} keys to the left, {} to the right of a query".format(*sides))
        named = {
            "first key": self.lower, "key behind the last": self.upper,
            "mask of all pairs": self.dense_mask, "bias of all pairs": self.bias,
        }  # fmt: skip
        for name, node in named.items():
            if node is not None:
                found.append(f"{name}: {shown(node)}")
        for i, node in enumerate(self.terms):
            term = self.program.terms[i]
            found.append(f"term t{i}, {term}: {shown(node)}")
        if self.has_options:
            slopes = "" if self.slopes is None else f", slopes of distances: {shown(self.slopes)}"
            found.append(f"soft cap: {self.softcap or 'none'}{slopes}, as options where Sq == Sk")
        if self.program is not None:
            name = lambda n: f"t{n.value}" if n.op == "term" else None  # noqa: E731
            for what, root in (("mask", self.program.mask), ("score", self.program.score)):
                if root is not None:
                    found.append(f"{what} in the kernel: {shown(root, name)}")
        return found


def split(
    e: Expressions, score: Node | None, masks: Sequence[Node], grads: Sequence[bool], name: str,
    whole: bool = False, varying: frozenset[str] = frozenset(),
) -> Split:  # fmt: skip
    """Split a score and masks; `grads` says of which captured tensors a gradient is wanted.

    `whole`: all of the mask is left to the program, but for what reads by query and key.
    `varying`: constants, as text, that are terms, so that programs do not differ by them.

    Raises:
        NotImplementedError: a tensor is read by query and key in a function that no bias expresses.
    """
    score = e.argument("score") if score is None else score
    conditions: list[Node] = []
    for mask in masks:
        _collect(mask, conditions)
    score = _without_masking(e, score, conditions)
    conditions = [c for c in dict.fromkeys(conditions) if c.op != "const" or not c.value]
    dense = _DenseReads([score, *conditions], grads)
    window: list[int | None] = [None, None]
    lowers, uppers, dense_masks, rest = [], [], [], []
    for condition in conditions:
        bounds = None if whole else _bounds(e, condition)
        if bounds is not None:
            for side, bound, known in ((0, bounds[0], lowers), (1, bounds[1], uppers)):
                if bound is None:
                    continue
                at = _from_own_index(bound, side)
                if at is None or window[side] is not None:
                    known.append(bound)
                else:
                    window[side] = at
        elif dense.reads(condition):
            dense_masks.append(condition)
        else:
            rest.append(condition)
    score, bias = _without_bias(e, score, dense, name)
    mask = _all(e, rest)
    roots = [x for x in (mask, score) if x is not None]
    factored = _Factored(e, roots, dense, grads, varying)
    program = None
    if mask is not None or score is not e.argument("score"):
        kept = None if score is e.argument("score") else factored.new[score]
        left = None if mask is None else factored.new[mask]
        program = ScoreProgram(tuple(factored.terms), left, kept, e)
    lower = _combined(e, "max", lowers)
    upper = _combined(e, "min", uppers)
    nodes = tuple(factored.nodes) if program is not None else ()
    softcap, slopes = (0.0, None) if mask is not None else _options(e, score, grads)
    return Split(
        e, tuple(window), lower, upper, _all(e, dense_masks), bias, program, nodes, softcap, slopes,
        name,
    )  # fmt: skip


def _options(e: Expressions, score: Node, grads: Sequence[bool]) -> tuple[float, Node | None]:
    """A soft cap and slopes of distances that are all of a score; else 0 and None."""
    core, added = _addends(e, score)
    slopes = None
    for addend in added:
        slope = _slope(e, addend)
        if slope is None or any(n.op == "load" and grads[n.value] for n in order(slope)):
            return 0.0, None
        slopes = slope if slopes is None else e.make("add", slopes, slope)
    if core is e.argument("score"):
        return 0.0, slopes
    for cap in (n.value for n in order(core) if n.op == "const" and n.value > 0):
        limit = e.constant(cap, FLOAT)
        tanh = e.make("tanh", e.make("div", e.argument("score"), limit))
        if core in (e.make("mul", tanh, limit), e.make("mul", limit, tanh)):
            return float(cap), slopes
    return 0.0, None


def _slope(e: Expressions, addend: Node) -> Node | None:
    """The slope of an addend that falls with the distance, by batch and head."""
    if addend.op == "neg":
        slope = _slope(e, addend.args[0])
        return None if slope is None else e.make("neg", slope)
    if addend.op != "mul":
        return None
    q, k = e.argument("q"), e.argument("k")
    distances = [
        e.make("to_float", e.make("abs", e.make("sub", *pair))) for pair in ((q, k), (k, q))
    ]
    for factor, other in (addend.args, addend.args[::-1]):
        if other in distances and not dependencies([factor])[factor] & {"q", "k", "score"}:
            return e.make("neg", factor)
    return None


def _all(e: Expressions, conditions: list[Node]) -> Node | None:
    return _combined(e, "and", conditions)


def _combined(e: Expressions, op: str, nodes: list[Node]) -> Node | None:
    found = None
    for node in nodes:
        found = node if found is None else e.make(op, found, node)
    return found


def _collect(condition: Node, conditions: list[Node]) -> None:
    """Add the conditions of which one is the conjunction."""
    stack = [condition]
    while stack:
        node = stack.pop()
        if node.op == "and":
            stack += reversed(node.args)
        else:
            conditions.append(node)


def _is_infinite(node: Node) -> bool:
    return node.op == "const" and node.type == FLOAT and node.value == -math.inf


def _without_masking(e: Expressions, score: Node, conditions: list[Node]) -> Node:
    """The score where no condition replaces it by -inf; these are added to the conditions."""
    if score.op == "where":
        condition, a, b = score.args
        if "score" in dependencies([condition])[condition]:
            return score
        if _is_infinite(b):
            _collect(condition, conditions)
            return _without_masking(e, a, conditions)
        if _is_infinite(a):
            _collect(e.make("not", condition), conditions)
            return _without_masking(e, b, conditions)
    if score.op == "add":
        return e.make("add", *(_without_masking(e, a, conditions) for a in score.args))
    return score


# Conditions that are bounds of keys.


def _bounds(e: Expressions, condition: Node) -> tuple[Node | None, Node | None] | None:
    """The first key and the key behind the last that a condition keeps, by query; or None."""
    if condition.op == "not":
        inner = condition.args[0]
        return _row_bounds(e, condition) if inner.op != "eq" or not _needs_key(inner) else None
    if condition.op in ("and", "or"):
        parts = [_bounds(e, a) for a in condition.args]
        if None in parts:
            return None
        (lower, upper), (other_lower, other_upper) = parts
        if condition.op == "and":
            both = [x for x in (lower, other_lower) if x is not None]
            ends = [x for x in (upper, other_upper) if x is not None]
            return _combined(e, "max", both), _combined(e, "min", ends)
        if lower is other_lower is None and upper is not None and other_upper is not None:
            return None, e.make("max", upper, other_upper)
        if upper is other_upper is None and lower is not None and other_lower is not None:
            return e.make("min", lower, other_lower), None
        return None
    if condition.op in ("lt", "le", "eq") and condition.args[0].type == INT:
        found = _key_bounds(e, condition)
        if found is not None:
            return found
    return _row_bounds(e, condition)


def _needs_key(node: Node) -> bool:
    return bool(dependencies([node])[node] & {"k", "score"})


def _row_bounds(e: Expressions, condition: Node) -> tuple[None, Node] | None:
    """A condition that does not depend on the key: all keys, or none."""
    if _needs_key(condition):
        return None
    everything, nothing = e.constant(UNBOUNDED_KEY, INT), e.constant(0, INT)
    return None, e.make("where", condition, everything, nothing)


def _key_bounds(e: Expressions, condition: Node) -> tuple[Node | None, Node | None] | None:
    """Of a comparison of the key, or of key // n, with a number of the query."""
    forms = linear_forms(condition)
    a, b = (forms[x] for x in condition.args)
    difference = a.plus(b, -1)  # < 0, <= 0 or == 0
    of_key = [n for n in difference.factors if _needs_key(n)]
    if len(of_key) != 1 or abs(difference.factors[of_key[0]]) != 1:
        return None
    (key,), step = of_key, 1
    if key.op == "floordiv" and key.args[1].op == "const" and key.args[1].value > 0:
        key, step = key.args[0], key.args[1].value
    if key is not e.argument("k"):
        return None
    sign = difference.factors[of_key[0]]
    rest = Linear({n: x for n, x in difference.factors.items() if n is not of_key[0]},
                  difference.constant)  # fmt: skip
    limit = _summed(e, rest.times(-sign))  # key <= limit, or >=, or ==
    if condition.op == "lt":
        limit = e.make("add", limit, e.constant(-sign, INT))
    first = e.make("mul", limit, e.constant(step, INT))
    behind = e.make("mul", e.make("add", limit, e.constant(1, INT)), e.constant(step, INT))
    if condition.op == "eq":
        return first, behind
    return (None, behind) if sign == 1 else (first, None)


def _summed(e: Expressions, form: Linear) -> Node:
    """A sum as a node."""
    total = e.constant(form.constant, INT)
    for node, factor in form.factors.items():
        total = e.make("add", total, e.make("mul", node, e.constant(factor, INT)))
    return total


def _from_own_index(bound: Node, side: int) -> int | None:
    """How far a bound is from the query's own index, if that is always as far."""
    form = linear_forms(bound)[bound]
    if [(n.op, n.value, x) for n, x in form.factors.items()] != [("argument", "q", 1)]:
        return None
    return -form.constant if side == 0 else form.constant - 1


# What is read by query and key.


class _DenseReads:
    """The elements of captured tensors that differ by query and key, other than by distance."""

    def __init__(self, roots: Sequence[Node], grads: Sequence[bool]) -> None:
        of = domains(roots)
        self.grads = grads
        self.loads = {
            n for n, domain in of.items()
            if n.op == "load" and domain == DENSE and self.block_of(n) is None
        }  # fmt: skip

    def reads(self, root: Node) -> bool:
        """Whether an expression reads such an element."""
        return any(n in self.loads for n in order(root))

    def block_of(self, load: Node) -> tuple[int, int] | None:
        """The blocks of queries and keys that share an element, where these index the tensor."""
        if len(load.args) < 2 or (load.type == FLOAT and self.grads[load.value]):
            return None
        block = []
        for node, name in zip(load.args[-2:], ("q", "k"), strict=True):
            if node.op != "floordiv" or node.args[0].value != name or node.args[1].op != "const":
                return None
            block.append(node.args[1].value)
        others = dependencies(load.args)
        if any(others[n] & {"q", "k"} for n in load.args[:-2]) or min(block) < 1:
            return None
        return block[0], block[1]


def _without_bias(
    e: Expressions, score: Node, dense: _DenseReads, name: str
) -> tuple[Node, Node | None]:
    """The score without what is added to it and reads by query and key, and that."""
    if not dense.reads(score):
        return score, None
    of_score, added = _addends(e, score)
    bias = _combined(e, "add", [x for x in added if dense.reads(x)])
    rest = [x for x in added if not dense.reads(x)]
    if of_score is None or dense.reads(of_score):
        load = next(n for n in order(score) if n in dense.loads)
        raise NotImplementedError(
            f"{name} reads a tensor by query and key, {e.shown(load)}, inside a function of the "
            "score: kernels have such tensors only where they are added, or are conditions"
        )
    return _combined(e, "add", [of_score, *rest]), bias


def _addends(e: Expressions, node: Node) -> tuple[Node | None, list[Node]]:
    """A sum as a part with the score and parts without it."""
    if "score" not in dependencies([node])[node]:
        return None, [node]
    if node.op in ("add", "sub", "neg"):
        parts = [_addends(e, a) for a in node.args]
        signs = [1, -1] if node.op == "sub" else [-1] if node.op == "neg" else [1, 1]
        total, added = None, []
        for (part, others), sign in zip(parts, signs, strict=True):
            if sign < 0:
                part = None if part is None else e.make("neg", part)
                others = [e.make("neg", x) for x in others]
            if part is not None:
                total = part if total is None else e.make("add", total, part)
            added += others
        return total, added
    if node.op in ("mul", "div"):
        needs = dependencies(node.args)
        factor = next((a for a in reversed(node.args) if "score" not in needs[a]), None)
        if factor is not None and (node.op == "mul" or factor is node.args[1]):
            other = node.args[0] if factor is node.args[1] else node.args[1]
            part, added = _addends(e, other)
            return e.make(node.op, part, factor), [e.make(node.op, x, factor) for x in added]
    return node, []


# Terms.


class _Factored:
    """Expressions with terms in place of what depends on at most one index."""

    def __init__(
        self, e: Expressions, roots: list[Node], dense: _DenseReads, grads: Sequence[bool],
        varying: frozenset[str],
    ) -> None:  # fmt: skip
        self.e, self.dense, self.grads, self.varying = e, dense, grads, varying
        self.terms: list[Term] = []
        self.nodes: list[Node] = []
        self.new: dict[Node, Node] = {}
        self._domains, self._needs = domains(roots), dependencies(roots)
        self._loads: dict[Node, bool] = {}
        self._cost: dict[Node, int] = {}
        for node in order(*roots):
            self._loads[node] = node.op == "load" or any(self._loads[a] for a in node.args)
            is_free = node.op in ("const", "argument", "to_float")
            own = 0 if is_free else 8 if node.op in ("log", "exp", "sin", "cos", "pow") else 1
            self._cost[node] = own + sum(self._cost[a] for a in node.args)
        for root in roots:
            self._factor(root)

    def _factor(self, root: Node) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self.new:
                stack.pop()
                continue
            domain = self._domain(node)
            if domain is not None and self._is_worth(node, domain):
                self.new[node] = self._term(node, domain)
                continue
            missing = [a for a in node.args if a not in self.new]
            if missing:
                stack += missing
                continue
            args = tuple(self.new[a] for a in node.args)
            self.new[node] = node if args == node.args else self.e.again(node, args)

    def _domain(self, node: Node) -> str | None:
        domain = self._domains[node]
        if domain == DENSE:
            is_block = node.op == "load" and self.dense.block_of(node) is not None
            return BLOCKS if is_block else None
        return domain

    def _is_worth(self, node: Node, domain: str) -> bool:
        if node.op == "const":
            return node.type != BOOL and literal(node.value) in self.varying
        if node.op == "argument":
            return False
        if node.op == "load":
            return True
        if domain == DISTANCE:
            return self._loads[node] and node.op not in _CHEAP or self._cost[node] > 3
        if self._loads[node] and node.op not in _CHEAP:
            return True
        return self._cost[node] > (4 if node.type == BOOL else 1)

    def _term(self, node: Node, domain: str) -> Node:
        type = FLOAT if node.type == FLOAT else INT
        grad = type == FLOAT and any(n.op == "load" and self.grads[n.value] for n in order(node))
        needs = self._needs[node]
        block = self.dense.block_of(node) if domain == BLOCKS else (0, 0)
        self.terms.append(Term(type, domain, "b" in needs, "h" in needs, grad, block))
        self.nodes.append(node)
        made = self.e.term(len(self.terms) - 1, type)
        return self.e.cast(made, BOOL) if node.type == BOOL else made


# The prologue.


class Prologue:
    """Computes what a split needs of captured tensors, for scores of a shape."""

    def __init__(
        self, split: Split, tensors: Sequence[Tensor], sizes: tuple[int, int, int, int],
        dtype: torch.dtype, device: torch.device, is_checked: bool = False,
    ) -> None:  # fmt: skip
        self.split, self.tensors, self.sizes = split, tensors, sizes
        self.is_checked = is_checked  # whether values may be read
        self.dtype, self.device = dtype, device

    def _range(self, *bounds: int) -> Tensor:
        return torch.arange(*bounds, device=self.device)

    def _evaluated(self, nodes: Sequence[Node], q: Tensor, k: Tensor, rank: int) -> list[Tensor]:
        """Expressions, with q and k in the last dimensions of `rank`."""
        B, H, Sq, Sk = self.sizes
        ones = (1,) * (rank - 2)
        indices = {
            "b": self._range(B).view(B, 1, *ones), "h": self._range(H).view(1, H, *ones),
            "q": q, "k": k,
        }  # fmt: skip
        full = {"b": B, "h": H} | ({"q": Sq, "k": Sk} if rank == 4 else {})

        def leaf(node: Node, index: list[Tensor]) -> Tensor:
            if node.op == "argument":
                return indices[node.value]
            t = self.tensors[node.value]
            found = self._view(t, node, full, rank)
            if found is None:
                found = self._indexed(t, index, node) if index else t
            found = found.to(self.device)  # a number may be on the CPU
            return found.to({FLOAT: self.dtype, INT: torch.int64, BOOL: torch.bool}[node.type])

        return evaluate(nodes, leaf, self.dtype, self.device)

    def _indexed(self, t: Tensor, index: list[Tensor], node: Node) -> Tensor:
        try:
            # traced, an index without dimensions beside others would get their dimensions twice
            return torch.ops.aten.index(t, list(torch.broadcast_tensors(*index)))
        except IndexError as error:
            name = self.split.expressions.shown(node)
            raise IndexError(
                f"{self.split.name} reads {name}, a tensor of shape {tuple(t.shape)}, out "
                f"of its bounds: {error}; every index is evaluated, also where keys are masked out"
            ) from None

    @staticmethod
    def _view(t: Tensor, load: Node, full: dict[str, int], rank: int) -> Tensor | None:
        """The elements of a tensor that is indexed by all values of indices, in their order."""
        names = [n.value for n in load.args if n.op == "argument"]
        order_of = [("b", "h", "q", "k").index(n) for n in names]
        if len(names) != len(load.args) or order_of != sorted(set(order_of)):
            return None
        if t.device.type == "meta" or any(
            n not in full or size != full[n] for n, size in zip(names, t.shape, strict=True)
        ):
            return None
        dims = dict(zip(order_of, t.shape, strict=True))
        return t.reshape([dims.get(i, 1) for i in range(rank)])

    def term(self, number: int) -> Tensor:
        """A term, (B or 1, H or 1, elements)."""
        node, term = self.split.terms[number], self.split.program.terms[number]
        _, _, Sq, Sk = self.sizes
        zero, before, behind = self._range(1), 0, 0
        if term.domain == TILE:
            q = k = zero
        elif term.domain == ROW:
            q, k = self._range(Sq), zero
        elif term.domain == COLUMN:
            q, k = zero, self._range(Sk)
        elif term.domain == DISTANCE:
            is_empty = type(Sq) is type(Sk) is int and Sq == Sk == 0
            distance = self._range(1 - Sk, 1 if is_empty else Sq)
            q, k = distance.clamp(min=0), (-distance).clamp(min=0)
            before, behind = padded(Sk) - Sk + (0 if is_empty else 1), padded(Sq) - Sq
        else:
            rows, columns = term.block
            q = self._range(0, Sq, rows).unsqueeze(-1)
            k = self._range(0, Sk, columns)
        (value,) = self._evaluated([node], q, k, 4 if term.domain == BLOCKS else 3)
        value = value[(None,) * (3 - value.dim())]
        value = value.flatten(-2) if term.domain == BLOCKS else value
        if before or behind:
            value = torch.nn.functional.pad(value, (before, behind))
        return value if term.type == FLOAT else self._narrow(value, node)

    def _narrow(self, value: Tensor, node: Node) -> Tensor:
        """Integers as kernels have them."""
        is_wide = any(
            n.op == "load" and self.tensors[n.value].dtype == torch.int64 for n in order(node)
        )
        if self.is_checked and is_wide and value.numel():
            limits = torch.iinfo(torch.int32)
            for extreme in map(int, value.aminmax()):
                if not limits.min <= extreme <= limits.max:
                    raise ValueError(
                        f"{self.split.name} needs integers of 32 bits, got {extreme}: subtract "
                        "what all elements have in common from the captured tensor"
                    )
        return value.to(torch.int32)

    def _element_by_element(self, node: Node, term: Term) -> Tensor | None:
        """A term of queries or keys that is a captured tensor as it is, in float32 or int32."""
        if node.op != "load" or term.domain not in (ROW, COLUMN):
            return None
        t, (B, H, Sq, Sk) = self.tensors[node.value], self.sizes
        if t.device != self.device or t.dtype not in (self.dtype, torch.int32):
            return None
        found = self._view(t, node, {"b": B, "h": H, "q": Sq, "k": Sk}, 4)
        return None if found is None else found.flatten(2)

    def packed_terms(self, writes: bool = False) -> tuple[Tensor | None, Tensor | None]:
        """The tensors of float terms and of int terms; `writes` as in `ScoreProgram.pack`."""
        program = self.split.program
        if program is None or not program.terms:
            return None, None
        terms = []
        for i, (node, term) in enumerate(zip(self.split.terms, program.terms, strict=True)):
            found = self._element_by_element(node, term) if writes else None
            terms.append(self.term(i) if found is None else found)
        like = torch.zeros(0, device=self.device)  # merged with equal ones, in graphs
        values = program.pack(FLOAT, terms, self.sizes, like, writes)
        return values, program.pack(INT, terms, self.sizes, like, writes)

    def key_ranges(self, lower: Node | None, upper: Node | None) -> Tensor | None:
        """int32 (B or 1, H or 1, Sq or 1, 2)."""
        if lower is None and upper is None:
            return None
        e, Sk = self.split.expressions, self.sizes[3]
        lower = e.constant(0, INT) if lower is None else lower
        upper = e.constant(UNBOUNDED_KEY, INT) if upper is None else upper
        bounds = self._evaluated([lower, upper], self._range(self.sizes[2]), self._range(1), 3)
        bounds = [x.clamp(0, Sk).to(torch.int32)[(None,) * (3 - x.dim())] for x in bounds]
        return torch.stack(torch.broadcast_tensors(*bounds), -1)

    def of_pairs(self, node: Node, *dtypes: torch.dtype) -> Tensor:
        """A mask or bias that broadcasts to (B, H, Sq, Sk); a captured one may have `dtypes`."""
        q, k = self._range(self.sizes[2]).unsqueeze(-1), self._range(self.sizes[3])
        if node.op == "load" and self.tensors[node.value].dtype in (self.dtype, *dtypes):
            t = self.tensors[node.value]
            B, H, Sq, Sk = self.sizes
            view = self._view(t, node, {"b": B, "h": H, "q": Sq, "k": Sk}, 4)
            if view is not None:
                return view
        (value,) = self._evaluated([node], q, k, 4)
        return value[(None,) * (4 - value.dim())]

    def slopes(self, node: Node) -> Tensor:
        """float32 (H,) or (B, H)."""
        (value,) = self._evaluated([node], self._range(1), self._range(1), 3)
        B, H = self.sizes[:2]
        value = value.float()[(None,) * (3 - value.dim())].squeeze(-1)
        value = value.expand(value.shape[0], H)
        return value[0] if value.shape[0] == 1 else value.expand(B, H)
