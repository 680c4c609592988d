"""Programs: what an operator is told of a score_mod and a mask_mod, as text, and their terms.

    fa1
    t0 float row bh grad      a term: its type, its domain, whether it differs by batch and by head
    t1 int column b           ("-": by neither), and whether its gradient is wanted
    x0 le(k, q)               an operation on the score, indices, terms, constants, earlier lines
    x1 eq(t1, 3)
    x2 and(x0, x1)
    x3 sub(score, t0)
    mask x2                   where it is false, a key is masked out; may be missing
    score x3                  the score in place of scale * q . k; may be missing

Lines may be joined by "; " in place of line breaks, as in the texts that are made here.

A term has an element for each query (`row`), each key (`column`), each distance q - k (`distance`),
each block of queries and keys (`blocks:128x128`), or for all (`tile`). The elements of all float
terms are in one tensor, those of all int terms in another one, as `ScoreProgram.places` says. Both
begin and end with elements of no term, which kernels may read in tiles that end outside.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.programs.expressions import (
    ARGUMENTS,
    BOOL,
    COLUMN,
    DISTANCE,
    FLOAT,
    INT,
    MAX_NODES,
    ROW,
    TILE,
    Expressions,
    Node,
    derivatives,
    literal,
    order,
)

VERSION = "fa1"
_BETWEEN = "; "  # lines: a line break would end a comment of generated code that shows the text
BLOCKS = "blocks"
PAD = 256  # elements: the lengths of rows and columns are multiples, so that no tile ends outside
ALIGNED = 64  # elements: every term starts at a multiple
MARGIN = 256  # elements of no term before the first and behind the last
MAX_TEXT = 2**18  # characters
MAX_TERMS = 64
TILE_SIZE = 128  # queries, and keys, of a tile of runs
MAX_RUNS = 16  # of tiles that a row of tiles lists; with more, neighbours are merged


class Term(NamedTuple):
    """Numbers that a program reads, one for each element of a domain."""

    type: str
    domain: str
    by_batch: bool
    by_head: bool
    grad: bool = False
    block: tuple[int, int] = (0, 0)  # queries and keys, of the domain BLOCKS

    def __str__(self) -> str:
        domain = (
            f"{BLOCKS}:{self.block[0]}x{self.block[1]}" if self.domain == BLOCKS else self.domain
        )
        differs = "b" * self.by_batch + "h" * self.by_head or "-"
        return f"{self.type} {domain} {differs}{' grad' * self.grad}"

    def length(self, Sq: int, Sk: int) -> int:
        """The elements of one batch and head."""
        if self.domain == BLOCKS:
            rows, columns = (-(-n // size) for n, size in zip((Sq, Sk), self.block, strict=True))
            return rows * columns
        Sq, Sk = padded(Sq), padded(Sk)
        return {TILE: 1, ROW: Sq, COLUMN: Sk, DISTANCE: Sq + Sk}[self.domain]

    def shape(self, B: int, H: int, Sq: int, Sk: int) -> tuple[int, int, int]:
        """(B or 1, H or 1, elements)."""
        return B if self.by_batch else 1, H if self.by_head else 1, self.length(Sq, Sk)


def padded(length: int) -> int:
    """A number of queries or keys as terms have it."""
    return -(-length // PAD) * PAD


class Place(NamedTuple):
    """Where a term is in the tensor of its type."""

    offset: int
    shape: tuple[int, int, int]


class ScoreProgram(NamedTuple):
    """A score and a mask as expressions of score, indices and terms."""

    terms: tuple[Term, ...]
    mask: Node | None
    score: Node | None
    expressions: Expressions

    @property
    def roots(self) -> tuple[Node, ...]:
        """The expressions that are not missing."""
        return tuple(x for x in (self.mask, self.score) if x is not None)

    @property
    def has_gradient(self) -> bool:
        """Whether the gradient of a term is wanted."""
        return any(term.grad for term in self.terms)

    def gradients(self) -> tuple[Node, dict[int, Node]]:
        """The derivative by the score, and by each term whose gradient is wanted, by its number."""
        e, score = self.expressions, self.expressions.argument("score")
        graded = [i for i, term in enumerate(self.terms) if term.grad]
        leaves = [score, *(e.term(i, FLOAT) for i in graded)]
        slope, *factors = derivatives(e, score if self.score is None else self.score, leaves)
        return slope, dict(zip(graded, factors, strict=True))

    def places(self, type: str, B: int, H: int, Sq: int, Sk: int) -> tuple[list[Place | None], int]:
        """Where each term of a type is in its tensor, and how many elements that has."""
        found, total = [], MARGIN
        for term in self.terms:
            if term.type != type:
                found.append(None)
                continue
            shape = term.shape(B, H, Sq, Sk)
            found.append(Place(total, shape))
            total += -(-(shape[0] * shape[1] * shape[2]) // ALIGNED) * ALIGNED
        return found, total + MARGIN

    def views(
        self, values: Tensor | None, indices: Tensor | None, B: int, H: int, Sq: int, Sk: int
    ) -> list[Tensor]:
        """The terms as views (B or 1, H or 1, elements) of their tensors."""
        sizes = B, H, Sq, Sk
        found: list[Tensor | None] = [None] * len(self.terms)
        for type, packed in ((FLOAT, values), (INT, indices)):
            for i, place in enumerate(self.places(type, *sizes)[0]):
                if place is not None:
                    b, h, n = place.shape
                    part = packed.narrow(0, place.offset, b * h * n)
                    found[i] = part.view(b, h, n)
        return found

    def pack(
        self, type: str, terms: Sequence[Tensor], sizes: tuple, like: Tensor, writes: bool = False
    ) -> Tensor | None:
        """The tensor of the terms of a type, given each as (B or 1, H or 1, elements unpadded).

        With `writes`, which no compiler or transform may see, they are copied where that is
        possible: one kernel for each on a GPU.
        """
        places, total = self.places(type, *sizes)
        if writes and not (torch.is_grad_enabled() and any(x.requires_grad for x in terms)):
            return self._written(places, total, terms, like)
        parts, at = [], 0
        for place, x in zip(places, terms, strict=True):
            if place is None:
                continue
            missing = place.shape[2] - x.shape[-1]
            x = x.expand(*place.shape[:2], -1)
            x = torch.nn.functional.pad(x, (0, missing)) if not _is_zero(missing) else x
            if not _is_zero(place.offset - at):
                parts.append(like.new_zeros(place.offset - at, dtype=x.dtype))
            parts.append(x.reshape(-1))
            at = place.offset + place.shape[0] * place.shape[1] * place.shape[2]
        if not parts:
            return None
        if not _is_zero(total - at):
            parts.append(like.new_zeros(total - at, dtype=parts[-1].dtype))
        return torch.cat(parts)

    @staticmethod
    def _written(
        places: list[Place | None], total: int, terms: Sequence[Tensor], like: Tensor
    ) -> Tensor | None:
        packed = None
        for place, x in zip(places, terms, strict=True):
            if place is not None:
                packed = like.new_zeros(total, dtype=x.dtype) if packed is None else packed
                part = packed.narrow(0, place.offset, math.prod(place.shape)).view(place.shape)
                part[..., : x.shape[-1]].copy_(x)
        return packed

    def __str__(self) -> str:
        lines = [VERSION, *(f"t{i} {term}" for i, term in enumerate(self.terms))]
        names: dict[Node, str] = {}
        for node in order(*self.roots):
            if node.op == "const":
                names[node] = literal(node.value)
            elif node.op == "argument":
                names[node] = node.value
            elif node.op == "term":
                names[node] = f"t{node.value}"
            else:
                names[node] = f"x{sum(name[0] == 'x' for name in names.values())}"
                lines.append(f"{names[node]} {node.op}({', '.join(names[a] for a in node.args)})")
        lines += [f"mask {names[self.mask]}"] if self.mask is not None else []
        lines += [f"score {names[self.score]}"] if self.score is not None else []
        return _BETWEEN.join(lines)


def program_error(text: str) -> str | None:
    """Why kernels, which compute with 32 bits, cannot have a program, or None."""
    for node in order(*parse(text).roots):
        if node.op == "pow":
            return "has no powers but those by small integers and by 0.5"
        if node.op == "const" and node.type == INT and not -(2**31) <= node.value < 2**31:
            return f"has integers of 32 bits, and the program has {node.value}"
    return None


def _is_zero(n: int) -> bool:
    return type(n) is int and n == 0  # a size that varies in a graph would be fixed


_CONSTANT = re.compile(r"(?<=[( ])-?(?:\d[\w.+-]*|nan)(?=[,)])")


def constants_of(text: str) -> tuple[str, list[str]]:
    """A program's text without its finite constants, and these."""
    return _CONSTANT.sub("#", text), _CONSTANT.findall(text)


def padding_of_distances(Sk: int) -> int:
    """The place of the distance 0 among the elements of a term of distances."""
    return padded(Sk)


# Text to program.

_TERM = re.compile(
    r"t(\d+) (float|int) (tile|row|column|distance|blocks:(\d+)x(\d+)) (b?h?|-)( grad)?"
)
_LINE = re.compile(r"x(\d+) ([a-z]+[0-9a-z_]*)\(([^()]*)\)")
_ROOT = re.compile(r"(mask|score) (\S+)")
_INTEGER = re.compile(r"-?\d{1,19}")
_REAL = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?|-?inf|nan")


@functools.lru_cache(4096)
def parse(text: str) -> ScoreProgram:
    """The program that a text is. Raises ValueError with the line that is none."""
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise ValueError(f"program must be a text of at most {MAX_TEXT} characters")
    e, terms, known, roots = Expressions(), [], {}, {}
    lines = text.removesuffix("\n").replace("\n", _BETWEEN).split(_BETWEEN)
    if lines[0] != VERSION or len(lines) > MAX_NODES:
        raise ValueError(
            f"program must begin with the line {VERSION!r} and have at most {MAX_NODES} lines, got "
            f"{text[:80]!r}"
        )
    for number, line in enumerate(lines[1:], 2):
        try:
            _read_line(line, e, terms, known, roots)
        except ValueError as error:
            raise ValueError(f"program, line {number}, {line[:80]!r}: {error}") from None
    program = ScoreProgram(tuple(terms), roots.get("mask"), roots.get("score"), e)
    if program.mask is not None and e.argument("score") in order(program.mask):
        raise ValueError("program has a mask that reads the score: put it into the score, as -inf")
    used = {n.value for n in order(*program.roots) if n.op == "term"}
    if used != set(range(len(terms))) or not roots:
        raise ValueError("program must have a mask or a score, which read each of its terms")
    return program


def _read_line(
    line: str, e: Expressions, terms: list[Term], known: dict[str, Node], roots: dict[str, Node]
) -> None:
    if match := _TERM.fullmatch(line):
        number, type, domain, rows, columns, differs, grad = match.groups()
        if known or roots or int(number) != len(terms) or not differs or len(terms) >= MAX_TERMS:
            raise ValueError("terms are numbered from t0, before all other lines")
        block = (int(rows), int(columns)) if rows else (0, 0)
        if (rows and 0 in block) or (grad and type != FLOAT):
            raise ValueError("blocks have queries and keys, and gradients are of floats")
        name = BLOCKS if rows else domain
        terms.append(Term(type, name, "b" in differs, "h" in differs, bool(grad), block))
    elif match := _LINE.fullmatch(line):
        number, op, args = match.groups()
        if roots or int(number) != len(known):
            raise ValueError("operations are numbered from x0, before mask and score")
        nodes = [_operand(arg, e, terms, known) for arg in args.split(", ")]
        known[f"x{number}"] = e.make(op, *nodes)
    elif match := _ROOT.fullmatch(line):
        name, value = match.groups()
        node = _operand(value, e, terms, known)
        if node.type != (BOOL if name == "mask" else FLOAT) or name in roots:
            raise ValueError("mask is one bool, and score one float")
        roots[name] = node
    else:
        raise ValueError("neither a term, an operation, a mask nor a score")


def _operand(text: str, e: Expressions, terms: Sequence[Term], known: dict[str, Node]) -> Node:
    if text in known:
        return known[text]
    if text in ARGUMENTS:
        return e.argument(text)
    if text in ("true", "false"):
        return e.constant(text == "true", BOOL)
    if _INTEGER.fullmatch(text):
        return e.constant(int(text), INT)
    if _REAL.fullmatch(text):
        return e.constant(float(text), FLOAT)
    if text[:1] == "t" and text[1:].isdecimal() and int(text[1:]) < len(terms):
        return e.term(int(text[1:]), terms[int(text[1:])].type)
    raise ValueError(f"{text[:40]!r} is not defined")
