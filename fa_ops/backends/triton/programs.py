"""Programs as functions of Triton, which the kernels of attention are compiled with.

A program (`fa_ops.programs.program`) becomes the source of a few functions of a tile of scores. A
kernel is given them as constants, and calls them where it has computed scores and where it has
their gradients.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl

from fa_ops.backends.triton.primitives import tanh
from fa_ops.programs.expressions import (
    COLUMN,
    DISTANCE,
    FLOAT,
    INT,
    ROW,
    TILE,
    Node,
    is_natural,
    order,
)
from fa_ops.programs.program import ALIGNED, MARGIN, PAD, ScoreProgram, parse

# What Triton's language lacks, or defines otherwise.


@triton.jit
def floor_quotient(a, b):
    """a // b rounded down, where Triton rounds to 0."""
    quotient, rest = a // b, a % b
    return quotient - ((rest != 0) & ((rest < 0) != (b < 0))).to(tl.int32)


@triton.jit
def floor_remainder(a, b):
    """a - b * floor(a / b), with the sign of b."""
    rest = a % b
    return rest + tl.where((rest != 0) & ((rest < 0) != (b < 0)), b, 0)


@triton.jit
def log1p(x):
    """log(1 + x), also of a small x (Kahan)."""
    y = 1.0 + x
    near = tl.where(y == 1.0, 1.0, y - 1.0)
    return tl.where(y == 1.0, x, tl.log(y) * (x / near))


@triton.jit
def expm1(x):
    """exp(x) - 1, also of a small x (Kahan)."""
    y = tl.exp(x)
    log = tl.log(y)
    safe = (y != 1.0) & (y > 0.0) & (y < float("inf"))
    ratio = x / tl.where(safe, log, 1.0)
    return tl.where(safe, (y - 1.0) * ratio, tl.where(y == 1.0, x, y - 1.0))


_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "quot": "//", "rem": "%", "shl": "<<",
    "shr": ">>", "bitand": "&", "bitor": "|", "bitxor": "^", "eq": "==", "lt": "<", "le": "<=",
    "and": "&", "or": "|", "xor": "!=",
}  # fmt: skip
_CALLS = {
    "abs": "tl.abs", "exp": "tl.exp", "exp2": "tl.exp2", "expm1": "expm1", "log": "tl.log",
    "log2": "tl.log2", "log1p": "log1p", "sqrt": "tl.sqrt", "rsqrt": "tl.rsqrt",
    "sigmoid": "tl.sigmoid", "sin": "tl.sin", "cos": "tl.cos", "erf": "tl.erf",
    "floor": "tl.floor", "ceil": "tl.ceil", "where": "tl.where",
}  # fmt: skip
_INDEX = {"b": "b", "h": "h", "q": "i", "k": "j", "score": "s"}


class ProgramFunctions(NamedTuple):
    """Functions of (scores, i, j, terms), natural scores of a tile; Triton compiles them."""

    apply: Any  # the scores that the program makes of scores, -inf where its mask is false
    slope: Any  # their derivative by the scores
    factors: dict[int, Any]  # by the number of a term: the derivative by it, where it has one


@functools.lru_cache(1024)
def program_functions(text: str) -> ProgramFunctions:
    """The functions of a program."""
    program = parse(text)
    slope, by_term = program.gradients()
    roots: dict[str, tuple[Node, ...]] = {"apply": program.roots, "slope": (slope,)}
    roots |= {f"factor{i}": (node,) for i, node in by_term.items()}
    source = "\n\n".join(_function(program, name, nodes) for name, nodes in roots.items())
    made = compiled(source)
    factors = {i: made[f"factor{i}"] for i in by_term}
    return ProgramFunctions(made["apply"], made["slope"], factors)


def compiled(source: str, names: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The functions of a module with this source, which Triton reads through `linecache`.

    `names`: what the source uses besides Triton and the functions above.
    """
    name = f"<fa_ops program {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    namespace = {
        "__name__": __name__, "triton": triton, "tl": tl, "tanh": tanh, "log1p": log1p,
        "expm1": expm1, "floor_quotient": floor_quotient, "floor_remainder": floor_remainder,
        **names,
    }  # fmt: skip
    exec(compile(source, name, "exec"), namespace)  # of `_function` alone, which parsed nodes make
    return namespace


def _function(program: ScoreProgram, name: str, roots: tuple[Node, ...]) -> str:
    lines = ["values, indices, b, h, batch, heads, Sq, Sk = terms"]
    lines += places(program, {n.value for n in order(*roots) if n.op == "term"})
    texts: dict[Node, str] = {}
    for count, node in enumerate(order(*roots)):
        text = _text(program, node, [texts[a] for a in node.args])
        if node.op not in ("const", "argument"):
            lines.append(f"x{count} = {text}")
            text = f"x{count}"
        texts[node] = text
    if name != "apply":
        lines.append(f"return {texts[roots[0]]}")
    else:
        score = "s" if program.score is None else texts[program.score]
        lines.append(f"out = tl.where(i < Sq, {score}, 0.0)")  # of no query: a number
        if program.mask is not None:
            lines.append(f'out = tl.where({texts[program.mask]}, out, float("-inf"))')
        lines.append("return out")
    body = "".join(f"    {line}\n" for line in lines)
    return f"@triton.jit\ndef {name}(s, i, j, terms):\n{body}"


def places(program: ScoreProgram, used: set[int]) -> list[str]:
    """Where each term that is used has the elements of this batch and head."""
    lines = [f"padded_q = (Sq + {PAD - 1}) // {PAD} * {PAD}",
             f"padded_k = (Sk + {PAD - 1}) // {PAD} * {PAD}"]  # fmt: skip
    at = {FLOAT: f"{MARGIN}", INT: f"{MARGIN}"}
    for i, term in enumerate(program.terms):
        length = {
            TILE: "1", ROW: "padded_q", COLUMN: "padded_k", DISTANCE: "(padded_q + padded_k)",
        }.get(term.domain)  # fmt: skip
        if length is None:
            rows, columns = term.block
            lines.append(f"across{i} = (Sk + {columns - 1}) // {columns}")
            length = f"((Sq + {rows - 1}) // {rows} * across{i})"
        if i in used:
            row = "b * heads + h" if term.by_batch and term.by_head else (
                "b" if term.by_batch else "h" if term.by_head else "0"
            )  # fmt: skip
            pointer = "values" if term.type == FLOAT else "indices"
            lines.append(
                f"t{i} = {pointer} + ({at[term.type]}) + ({row}) * tl.cast({length}, tl.int64)"
            )
        lines.append(f"end{i} = ({at[term.type]}) + (tl.cast({length}, tl.int64)"
                     f"{' * batch' * term.by_batch}{' * heads' * term.by_head} + {ALIGNED - 1})"
                     f" // {ALIGNED} * {ALIGNED}")  # fmt: skip
        at[term.type] = f"end{i}"
    return lines


def _text(program: ScoreProgram, node: Node, args: list[str]) -> str:
    """A node as an expression of Triton."""
    op = node.op
    if op == "const":
        value = float(node.value) if node.type == FLOAT else node.value
        special = node.type == FLOAT and (value != value or abs(value) == float("inf"))
        return f'float("{value}")' if special else f"({value})"
    if op == "argument":
        return _INDEX[node.value]
    if op == "term":
        return _load(program, node.value)
    if op in _BINARY:
        return f"{args[0]} {_BINARY[op]} {args[1]}"
    if op in ("floordiv", "mod"):
        return _floored(node, args)
    if op in ("min", "max"):
        nan = ", propagate_nan=tl.PropagateNan.ALL" if node.type == FLOAT else ""
        return f"tl.{op}imum({args[0]}, {args[1]}{nan})"
    if op == "neg":
        return f"-{args[0]}"
    if op in ("not", "bitnot"):
        return f"({args[0]} == 0)" if op == "not" else f"~{args[0]}"
    if op == "detach":  # only derivatives differ
        return args[0]
    if op == "to_float":
        return f"{args[0]}.to(tl.float32)"
    if op == "to_int":
        return f"{args[0]}.to(tl.int32)"
    if op == "tanh":
        return f"tanh({args[0]}, True)"
    if op == "trunc":
        return f"tl.where({args[0]} < 0.0, tl.ceil({args[0]}), tl.floor({args[0]}))"
    return f"{_CALLS[op]}({', '.join(args)})"


def _floored(node: Node, args: list[str]) -> str:
    a, b = args
    divisor = node.args[1].value if node.args[1].op == "const" else 0
    if divisor > 0 and divisor & (divisor - 1) == 0:
        return (
            f"{a} >> {divisor.bit_length() - 1}"
            if node.op == "floordiv"
            else f"{a} & {divisor - 1}"
        )
    if divisor > 0 and is_natural(node.args[0]):
        return f"{a} {'//' if node.op == 'floordiv' else '%'} {b}"
    return f"floor_{'quotient' if node.op == 'floordiv' else 'remainder'}({a}, {b})"


def _load(program: ScoreProgram, number: int) -> str:
    term = program.terms[number]
    if term.domain == TILE:
        return f"tl.load(t{number})"
    if term.domain == ROW:
        return f"tl.load(t{number} + i)"
    if term.domain == COLUMN:
        return f"tl.load(t{number} + j)"
    if term.domain == DISTANCE:
        return f"tl.load(t{number} + (i - j + padded_k))"
    rows, columns = term.block
    inside = f"(i // {rows} * across{number} + j // {columns})"
    return f"tl.load(t{number} + {inside}, mask=(i < Sq) & (j < Sk), other=0)"
