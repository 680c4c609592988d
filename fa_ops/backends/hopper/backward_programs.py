"""Programs as C++ of the backward kernels: what scores become, and the derivatives.

What a program adds to all scores of a query changes no weight. It is subtracted from the
log-sum-exps before the products, and its gradient is that of the log-sum-exps; the kernels apply
the rest.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from fa_ops.backends.hopper import programs
from fa_ops.programs.expressions import (
    COLUMN,
    DISTANCE,
    FLOAT,
    ROW,
    TILE,
    Node,
    dependencies,
    derivatives,
    order,
)
from fa_ops.programs.program import ScoreProgram, parse, program_error

_SMALLEST, _LARGEST = 2.0**-6, 2.0**14  # bounds of factors that float16 holds to its precision

# What may not be finite where a score is.
_POLES = frozenset(("div", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt"))

# Derivatives by the score that the kernels multiply gradients with.
NO_FACTORS, OF_TERMS, PACKED, WHOLE = range(4)  # 1; free of the score; kept as float16, as float32


class BackwardProgram(NamedTuple):
    """A program as the backward kernels compute it."""

    header: str  # score_program.cuh
    has_mask: bool
    factors: int
    changes_scores: bool  # by more than what they all have in common for a query
    key_sums: tuple[int, ...]  # terms whose gradients the pass over keys sums
    distance_sum: int | None  # the term of distances of which it does
    keeps_factors: bool  # whether one of the derivatives by terms depends on the score
    # terms of queries, or of all scores, and the derivative of the log-sum-exps by each
    row_grads: tuple[tuple[int, float], ...]
    error: str | None  # why the kernels do not have it

    @property
    def keeps_registers(self) -> bool:
        """Whether threads hold numbers beside scores while they compute gradients."""
        sums = len(self.key_sums) + 2 * (self.keeps_factors or self.distance_sum is not None)
        return self.factors >= PACKED or sums > 1


def header(text: str) -> str:
    """The text of `score_program.cuh` of the backward kernels."""
    return backward_program(text).header


@functools.lru_cache(1024)
def backward_program(text: str) -> BackwardProgram:
    """The parts of a program."""
    program = parse(text)
    e = program.expressions
    score = e.argument("score")
    offset, core = _parts(program)
    graded = [i for i, term in enumerate(program.terms) if term.grad]
    leaves = [score, *(e.term(i, FLOAT) for i in graded)]
    slope, *of_terms = derivatives(e, core, leaves)
    of_offset = derivatives(e, offset, leaves)[1:]
    error, sums, distances, row_grads = program_error(text), [], [], []
    kept, has_poles = None, False  # the term of which derivatives depend on the score
    for i, of_core, of_row in zip(graded, of_terms, of_offset):
        term = program.terms[i]
        if not _is_zero(of_core):
            found = {TILE: sums, COLUMN: sums, DISTANCE: distances}.get(term.domain)
            is_known = found is sums or (found is distances and not found)
            if score in order(of_core):
                is_known, kept = found is sums and kept is None, i
                has_poles = any(n.op in _POLES for n in order(of_core))
            if not is_known:
                error = error or f"has no gradient of term t{i} of the program"
            else:
                found.append(i)
        if not _is_zero(of_row):
            if of_row.op != "const" or term.domain not in (ROW, TILE):
                error = error or f"has no gradient of term t{i} of the program"
            else:
                row_grads.append((i, of_row.value))
    summed = sorted(sums + distances)  # in the order of the header's factors
    terms = [term._replace(grad=i in summed) for i, term in enumerate(program.terms)]
    changed = None if core is score else core
    functions = programs.header_of(ScoreProgram(tuple(terms), program.mask, changed, e))
    has_offset = not _is_zero(offset)
    if has_offset:
        functions += _offset_function(ScoreProgram(program.terms, None, offset, e))
    kind = _kind(score, slope)
    by_head = sum(program.terms[i].by_head << n for n, i in enumerate(sums))
    macros = {
        "FACTORS": kind, "HAS_OFFSET": int(has_offset), "KEY_SUMS": len(sums),
        "SUMS_BY_HEAD": by_head, "DISTANCE_SUMS": len(distances),
        "KEPT_FACTOR": summed.index(kept) if kept in summed else -1,
        "HAS_POLES": int(has_poles),
        "DISTANCE_FACTOR": summed.index(distances[0]) if distances else 0,
    }  # fmt: skip
    numbers = ", ".join(str(summed.index(i)) for i in sums) or "0"
    header = functions + f"constexpr int PROGRAM_SUM_FACTORS[] = {{{numbers}}};\n"
    header += "".join(f"#define PROGRAM_{n} {x}\n" for n, x in macros.items())
    return BackwardProgram(
        header, program.mask is not None, kind, changed is not None, tuple(sums),
        distances[0] if distances else None, kept is not None, tuple(row_grads), error,
    )  # fmt: skip


def _offset_function(program: ScoreProgram) -> str:
    """`program_offset`, what is added to all scores of a query, in a namespace of its own."""
    lines = programs.header_of(program).splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return f"""namespace query_offset {{
{text}
}}
DEVICE float program_offset(const ProgramInputs& p, int b, int h, int q) {{
  const query_offset::ProgramTile t = query_offset::program_tile(p, b, h);
  const query_offset::ProgramBlock x = query_offset::program_block(t, q, 0);
  const query_offset::ProgramColumn none = {{}};
  return query_offset::program_score(t, query_offset::program_row(t, q), none, x, 0, 0, 0.f);
}}
"""


def _is_zero(node: Node) -> bool:
    return node.op == "const" and node.value == 0.0


def _parts(program: ScoreProgram) -> tuple[Node, Node]:
    """What a program adds to all scores of a query, and the score without it."""
    e, needs = program.expressions, {TILE: (), ROW: ("q",), COLUMN: ("k",)}
    root = e.argument("score") if program.score is None else program.score

    def of_term(node: Node) -> frozenset:
        return frozenset(needs.get(program.terms[node.value].domain, ("q", "k")))

    depends = dependencies([root], of_term)
    sums = {True: e.constant(0.0, FLOAT), False: e.constant(0.0, FLOAT)}
    for sign, node in _addends(root, 1):
        is_of_row = not depends[node] & {"score", "k"}
        sums[is_of_row] = e.make("add" if sign > 0 else "sub", sums[is_of_row], node)
    return sums[True], sums[False]


def _addends(node: Node, sign: int) -> list[tuple[int, Node]]:
    if node.op in ("add", "sub") and node.type == FLOAT:
        a, b = node.args
        return _addends(a, sign) + _addends(b, sign if node.op == "add" else -sign)
    if node.op == "neg" and node.type == FLOAT:
        return _addends(node.args[0], -sign)
    return [(sign, node)]


def _kind(score: Node, slope: Node) -> int:
    if slope.op == "const" and slope.value == 1.0:
        return NO_FACTORS
    if score not in order(slope):
        return OF_TERMS
    least, most = _interval(slope)
    return PACKED if _SMALLEST <= max(abs(least), abs(most)) <= _LARGEST else WHOLE


def _interval(root: Node) -> tuple[float, float]:
    """Numbers between which an expression is, infinite where that is not known."""
    anything, found = (-math.inf, math.inf), {}
    for n in order(root):
        args = [found[a] for a in n.args]
        x = anything
        if n.op == "const" and n.type == FLOAT:
            x = n.value, n.value
        elif n.op in ("tanh", "erf", "sin", "cos"):
            x = -1.0, 1.0
        elif n.op == "sigmoid":
            x = 0.0, 1.0
        elif n.op == "where":
            x = min(args[1][0], args[2][0]), max(args[1][1], args[2][1])
        elif n.op == "add" and n.type == FLOAT:
            x = args[0][0] + args[1][0], args[0][1] + args[1][1]
        elif n.op == "sub" and n.type == FLOAT:
            x = args[0][0] - args[1][1], args[0][1] - args[1][0]
        elif n.op == "neg" and n.type == FLOAT:
            x = -args[0][1], -args[0][0]
        elif n.op == "mul" and n.type == FLOAT and all(map(math.isfinite, args[0] + args[1])):
            ends = [a * b for a in args[0] for b in args[1]]
            x = (0.0 if n.args[0] is n.args[1] else min(ends)), max(ends)
        found[n] = x
    return found[root]
