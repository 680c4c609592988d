"""Programs as C++, which the CUDA kernels of attention are compiled with.

`header` makes `score_program.cuh` of a program's text (`fa_ops.programs.program`). All functions
of it are inlined. A value is computed where it changes: in a tile (a batch and head), in a row (a
query), a column (a key), a block (a thread's scores of a step), or in an element, a score. Score
(R, C) of a block is that of query `q0 + R` and key `k0 + C`; kernels call with R and C that are
known once loops are unrolled, and then what is linear in both indices, and the address of a term of
distances, is a value of the block with an immediate.

    constexpr bool PROGRAM_HAS_SCORE, PROGRAM_HAS_MASK
    constexpr int PROGRAM_SLOPE    0: d score / d score is 1, 1: free of the score, 2: neither
    constexpr int PROGRAM_GRADS    how many terms have gradients: the `grad` below
    ProgramTile program_tile(const ProgramInputs&, int b, int h)
    ProgramRow program_row(const ProgramTile&, int q)              any query
    ProgramColumn program_column(const ProgramTile&, int k)        any key
    ProgramBlock program_block(const ProgramTile&, int q0, int k0)
    void program_rows(const ProgramBlock&, int R, ProgramRow& r0, ProgramRow& r1)
        queries q0 + R and q0 + R + 1, the first of them even
    void program_columns(const ProgramBlock&, int C, ProgramColumn& c0, ProgramColumn& c1)
        keys k0 + C and k0 + C + 1, the first of them even

    float program_score(t, r, c, x, R, C, float s)    s: the product of query and key, unscaled
    bool program_keeps(t, r, c, x, R, C)              whether the mask keeps the key
    float program_slope(t, r, c, x, R, C, float s)    d score / d (scale * s)
    float program_factor(int grad, t, r, c, x, R, C, float s)    d score / d term
        of the term `PROGRAM_TERMS[grad]`, whose domain is `PROGRAM_DOMAINS[grad]`: TILE_TERM,
        ROW_TERM, COLUMN_TERM or DISTANCE_TERM

`t, r, c, x` are a `ProgramTile`, `ProgramRow`, `ProgramColumn` and `ProgramBlock`. Without a score
in the program `program_score` gives `s` times the scale, without a mask `program_keeps` is true.
Scores are natural ones (to base e). Terms are read up to 255 queries and keys behind the last.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence

from fa_ops.programs.expressions import (
    BOOL,
    COLUMN,
    DISTANCE,
    FLOAT,
    INT,
    ROW,
    TILE,
    Expressions,
    Linear,
    Node,
    dependencies,
    is_natural,
    linear_forms,
    order,
)
from fa_ops.programs.program import BLOCKS, MARGIN, ScoreProgram, Term, parse

_TYPES = {FLOAT: "float", INT: "int", BOOL: "bool"}
_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "quot": "/", "rem": "%", "shl": "<<", "shr": ">>",
    "bitand": "&", "bitor": "|", "bitxor": "^", "eq": "==", "lt": "<", "le": "<=", "and": "&",
    "or": "|", "xor": "!=",
}  # fmt: skip
_CALLS = {
    "exp2": "exp2_fast", "log2": "log2_fast", "expm1": "expm1f", "log1p": "log1pf",
    "sqrt": "sqrtf", "rsqrt": "rsqrtf", "sin": "program_sin", "cos": "program_cos", "erf": "erff",
    "floor": "floorf", "ceil": "ceilf", "trunc": "truncf",
}  # fmt: skip
_MIRRORED = {"lt": ">", "le": ">=", "eq": "=="}
_SCALE = -1  # the number of the scale among terms
_DOMAINS = {TILE: "TILE_TERM", ROW: "ROW_TERM", COLUMN: "COLUMN_TERM", DISTANCE: "DISTANCE_TERM"}
_LIMIT = 2**31
_SAFE = 2**28  # integers whose sums of a few do not overflow
_LARGE_CAP = 256.0  # from here on an error of 1e-7 of it is noticeable in a score

_ARGUMENTS = (
    "const ProgramTile& t, const ProgramRow& r, const ProgramColumn& c, const ProgramBlock& x"
)
_ELEMENT = f"{_ARGUMENTS}, int R, int C"


@functools.lru_cache(1024)
def header(text: str) -> str:
    """The text of `score_program.cuh` of a program."""
    return _Emission(parse(text)).header()


def header_of(program: ScoreProgram) -> str:
    """The same of a program that need not read all of its terms."""
    return _Emission(program).header()


@functools.lru_cache(1024)
def slope_kind(text: str) -> int:
    """The derivative of the score: 1 (0), free of the score itself (1), or not (2)."""
    return _Emission(parse(text)).slope_kind


class _Emission:
    """The functions of a program, and the values of outer levels that they read."""

    def __init__(self, program: ScoreProgram) -> None:
        self.program, self.terms = program, program.terms
        e = program.expressions
        score = e.argument("score") if program.score is None else program.score
        slope, factors = program.gradients()
        keeps = e.constant(True, BOOL) if program.mask is None else program.mask
        rewritten = _Rewriting(e, self.of_term)
        roots = [rewritten.of(node) for node in (score, keeps, slope, *factors.values())]
        self.score, self.keeps, self.slope, *self.factors = roots
        self.graded = list(factors)
        self.needs = dependencies(roots, self.of_term)
        self.forms = linear_forms(*roots)
        self.tile: dict[Node, str] = {}  # fields of ProgramTile by the node whose value they are
        self.block: dict[tuple, tuple[str, str, str]] = {}  # of ProgramBlock: name, type, value
        self.used: dict[int, Term] = {}  # terms that are read

    def of_term(self, node: Node) -> frozenset[str]:
        """The indices of which a term is a function."""
        domain = TILE if node.value == _SCALE else self.terms[node.value].domain
        return frozenset({TILE: "", ROW: "q", COLUMN: "k"}.get(domain, "qk"))

    @property
    def slope_kind(self) -> int:
        """As of the function `slope_kind`."""
        if self.slope.op == "const" and self.slope.value == 1.0:
            return 0
        return 2 if "score" in self.needs[self.slope] else 1

    def header(self) -> str:
        """The text of the header."""
        functions = [
            self._element("float program_score", ", float s", self.score),
            self._element("bool program_keeps", "", self.keeps),
            self._element("float program_slope", ", float s", self.slope),
            *(
                self._element(f"float program_factor{i}", ", float s", node)
                for i, node in enumerate(self.factors)
            ),
        ]
        tile = self._tile_function()  # which says what it reads
        outer = [self._structs(), tile]
        outer += self._line_functions() + self._pair_functions()
        first = ["#pragma once", '#include "programs.cuh"', self._constants()]
        return "\n".join([*first, *outer, *functions, self._factor_function(), ""])

    def _constants(self) -> str:
        program, count = self.program, len(self.graded)
        numbers = ", ".join(map(str, self.graded)) or "0"
        domains = ", ".join(_DOMAINS[self.terms[i].domain] for i in self.graded) or "TILE_TERM"
        return "\n".join([
            f"constexpr bool PROGRAM_HAS_SCORE = {str(program.score is not None).lower()};",
            f"constexpr bool PROGRAM_HAS_MASK = {str(program.mask is not None).lower()};",
            f"constexpr int PROGRAM_SLOPE = {self.slope_kind}, PROGRAM_GRADS = {count};",
            "enum ProgramDomain { TILE_TERM, ROW_TERM, COLUMN_TERM, DISTANCE_TERM };",
            f"constexpr int PROGRAM_TERMS[{max(count, 1)}] = {{{numbers}}};",
            f"constexpr ProgramDomain PROGRAM_DOMAINS[{max(count, 1)}] = {{{domains}}};",
        ])  # fmt: skip

    # Elements.

    def _element(self, name: str, more: str, root: Node) -> str:
        lines, result = self._computed([root], self._leaf)
        body = "".join(f"  {line}\n" for line in [*lines, f"return {result[0]};"])
        return f"DEVICE {name}({_ELEMENT}{more}) {{\n{body}}}"

    def _computed(
        self, roots: Sequence[Node], leaf: Callable[[Node], str | None]
    ) -> tuple[list[str], list[str]]:
        """Lines that compute expressions, and these; `leaf` gives what is not computed here."""
        known: dict[Node, str | None] = {}

        def is_leaf(node: Node) -> bool:
            if node not in known:
                known[node] = leaf(node)
            return known[node] is not None

        lines: list[str] = []
        for node in order(*roots, is_leaf=is_leaf):
            if not is_leaf(node):
                name = f"y{len(lines)}"
                value = _operation(node, [known[a] for a in node.args])
                lines.append(f"const {_TYPES[node.type]} {name} = {value};")
                known[node] = name
        return lines, [known[root] for root in roots]

    def _leaf(self, node: Node) -> str | None:
        """An expression that a function of an element does not compute, or None."""
        if node.op == "const":
            return _literal(node)
        if node.op == "argument":
            return {"score": "s", "b": "t.b", "h": "t.h", "q": "(x.q + R)", "k": "(x.k + C)"}[
                node.value
            ]
        if not self.needs[node] & {"score", "q", "k"}:
            return self._of_tile(node)
        if node.op == "term":
            return self._element_of_term(node.value)
        if node.type == INT:
            return self._linear(node, self.forms[node], "int")
        if node.op == "to_float" and node.args[0].type == INT:
            return self._linear(node, self.forms[node.args[0]], "float")
        if node.op in _MIRRORED and node.args[0].type == INT:
            return self._compared(node)
        return None

    def _of_tile(self, node: Node) -> str:
        return f"t.{self.tile.setdefault(node, f'u{len(self.tile)}')}"

    def _element_of_term(self, number: int) -> str:
        term = self.used.setdefault(number, self.terms[number])
        if term.domain in (ROW, COLUMN):
            return f"{'r' if term.domain == ROW else 'c'}.t{number}"
        if term.domain == DISTANCE:
            return f"x.distance{number}(R, C)"
        rows, columns = term.block
        row = f"(unsigned)min(x.q + R, t.Sq - 1) / {rows}u"
        column = f"(unsigned)min(x.k + C, t.Sk - 1) / {columns}u"
        return f"program_load(t.at{number} + ({row} * (long long)t.across{number} + {column}))"

    def _block_field(self, key: tuple, type: str, value: str) -> str:
        found = self.block.setdefault(key, (f"v{len(self.block)}", type, value))
        return f"x.{found[0]}"

    def _linear(self, node: Node, form: Linear, type: str) -> str | None:
        """A number that is linear in query and key, beside numbers of the tile."""
        q, k, rest = _coefficients(form)
        if not (q or k) or any(self.needs[n] & {"q", "k"} for n in rest) or node in rest:
            return None
        parts = [f"{x} * {name}" for x, name in ((q, "q"), (k, "k")) if x]
        parts += [f"{x} * {self._leaf(n)}" for n, x in rest.items()]
        parts += [str(form.constant)] if form.constant else []
        value = " + ".join(parts)
        field = self._block_field(
            (node, type), type, f"(float)({value})" if type == "float" else value
        )
        offset = " + ".join(f"{x} * {name}" for x, name in ((q, "R"), (k, "C")) if x)
        return f"({field} + {'(float)' * (type == 'float')}({offset}))"

    def _compared(self, node: Node) -> str | None:
        """A comparison of a sum of indices with a number, without overflow."""
        a, b = (self.forms[n] for n in node.args)
        form = a.plus(b, -1)
        q, k, rest = _coefficients(form)
        if rest or not (q or k) or abs(q) > 2 or abs(k) > 2 or abs(form.constant) >= _SAFE:
            return None
        value = " + ".join(f"{x} * {name}" for x, name in ((q, "q"), (k, "k")) if x)
        field = self._block_field((node.args, "int"), "int", f"{value} + {form.constant}")
        offset = " + ".join(f"{x} * {name}" for x, name in ((q, "R"), (k, "C")) if x)
        sign = {"lt": "<", "le": "<=", "eq": "=="}[node.op]
        return f"({field} {sign} -({offset}))"

    # Outer levels, of what the functions of elements have turned out to read.

    def _structs(self) -> str:
        pointers = {
            i: f"const {_TYPES[term.type]}* at{i}"
            for i, term in sorted(self.used.items()) if term.domain != TILE
        }  # fmt: skip
        tile = ["int b, h, Sq, Sk", *pointers.values()]
        tile += [f"long long across{i}" for i, t in self.used.items() if t.domain == BLOCKS]
        tile += [f"{_TYPES[node.type]} {name}" for node, name in self.tile.items()]
        block = ["int q, k", *(pointers[i] for i, _ in self._terms_of(ROW, COLUMN, DISTANCE))]
        block += [f"{type} {name}" for name, type, _ in self.block.values()]
        block += [
            f"DEVICE {_TYPES[term.type]} distance{i}(int R, int C) const "
            f"{{ return program_load(at{i} + (R - C)); }}"
            for i, term in self._terms_of(DISTANCE)
        ]
        structs = {"Tile": tile, "Block": block}
        for name, domain in (("Row", ROW), ("Column", COLUMN)):
            found = self._terms_of(domain)
            structs[name] = [f"{_TYPES[term.type]} t{i}" for i, term in found]
        return "\n".join(
            f"struct Program{name} {{\n"
            + "".join(f"  {x}{'' if x[-1] == '}' else ';'}\n" for x in fields)
            + "};"
            for name, fields in structs.items()
        )

    def _terms_of(self, *domains: str) -> list[tuple[int, Term]]:
        return [(i, term) for i, term in sorted(self.used.items()) if term.domain in domains]

    def _tile_function(self) -> str:
        def leaf(node: Node) -> str | None:
            if node.op == "const":
                return _literal(node)
            if node.op == "argument":
                return node.value
            if node.op != "term":
                return None
            if node.value == _SCALE:
                return "p.scale"
            self.used[node.value] = self.terms[node.value]
            return f"program_load(at{node.value})"

        computed, values = self._computed(list(self.tile), leaf)
        lines = ["ProgramTile t = {};", "t.b = b, t.h = h, t.Sq = p.Sq, t.Sk = p.Sk;",
                 "const long long padded_q = program_padded(p.Sq);",
                 "const long long padded_k = program_padded(p.Sk);"]  # fmt: skip
        for type, tensor in ((FLOAT, "values"), (INT, "indices")):
            lines += self._places(type, tensor)
        lines += computed
        lines += [f"t.{name} = {x};" for name, x in zip(self.tile.values(), values, strict=True)]
        head = "ProgramTile program_tile(const ProgramInputs& p, int b, int h)"
        return _function(head, [*lines, "return t;"])

    def _places(self, type: str, tensor: str) -> list[str]:
        """Where each term of a type has the elements of this batch and head."""
        lines, place = [], str(MARGIN)
        for i, term in enumerate(self.terms):
            if term.type != type:
                continue
            length = {
                TILE: "1ll", ROW: "padded_q", COLUMN: "padded_k", DISTANCE: "padded_q + padded_k",
            }.get(term.domain)  # fmt: skip
            across = f"(p.Sk + {term.block[1] - 1}) / {max(term.block[1], 1)}"
            if length is None:
                rows = term.block[0]
                length = f"(p.Sq + {rows - 1}) / {rows} * (long long)({across})"
            lines.append(f"const long long place{i} = {place}, length{i} = {length};")
            if i in self.used:
                row = " + ".join(["b * p.H"] * term.by_batch * term.by_head + ["h"] * term.by_head)
                row = row or ("b" if term.by_batch else "0")
                zero = " + padded_k" if term.domain == DISTANCE else ""
                at = f"p.{tensor} + (place{i} + ({row}) * length{i}{zero})"
                lines.append(f"const {_TYPES[type]}* at{i} = {at};")
                if term.domain != TILE:
                    lines.append(f"t.at{i} = at{i};")
                if term.domain == BLOCKS:
                    lines.append(f"t.across{i} = {across};")
            count = f"length{i}{' * p.B' * term.by_batch}{' * p.H' * term.by_head}"
            place = f"place{i} + program_aligned({count})"
        return lines

    def _line_functions(self) -> list[str]:
        """Those of single rows, columns and blocks."""
        found = []
        for name, domain, index in (("Row", ROW, "q"), ("Column", COLUMN, "k")):
            loads = [
                f"y.t{i} = program_load(t.at{i} + {index});" for i, _ in self._terms_of(domain)
            ]
            head = f"Program{name} program_{name.lower()}(const ProgramTile& t, int {index})"
            found.append(_function(head, [f"Program{name} y = {{}};", *loads, "return y;"]))
        values = [f"x.at{i} = t.at{i} + q;" for i, _ in self._terms_of(ROW)]
        values += [f"x.at{i} = t.at{i} + k;" for i, _ in self._terms_of(COLUMN)]
        values += [f"x.at{i} = t.at{i} + (q - k);" for i, _ in self._terms_of(DISTANCE)]
        values += [f"x.{name} = {value};" for name, _, value in self.block.values()]
        head = "ProgramBlock program_block(const ProgramTile& t, int q, int k)"
        lines = ["ProgramBlock x = {};", "x.q = q, x.k = k;", *values, "return x;"]
        return [*found, _function(head, lines)]

    def _pair_functions(self) -> list[str]:
        """Those of two neighbouring rows, or columns."""
        found = []
        for name, domain, index in (("Row", ROW, "R"), ("Column", COLUMN, "C")):
            y = "rc"[domain == COLUMN]
            loads = [f"program_load2(x.at{i} + {index}, {y}0.t{i}, {y}1.t{i});"
                     for i, _ in self._terms_of(domain)]  # fmt: skip
            head = (f"void program_{name.lower()}s(const ProgramBlock& x, int {index}, "
                    f"Program{name}& {y}0, Program{name}& {y}1)")  # fmt: skip
            found.append(_function(head, loads))
        return found

    def _factor_function(self) -> str:
        lines = [f"if (grad == {i}) return program_factor{i}(t, r, c, x, R, C, s);"
                 for i in range(len(self.factors))]  # fmt: skip
        head = f"float program_factor(int grad, {_ELEMENT}, float s)"
        return _function(head, [*lines, "return 0.f;"])


class _Rewriting:
    """Expressions in operations that are fast on a GPU, with the scale beside the score.

    Functions become exp2, log2 and reciprocals, and factors that are the same for a whole tile are
    multiplied once for it.
    """

    def __init__(self, e: Expressions, of_term: Callable[[Node], frozenset[str]]) -> None:
        self.e, self._of_term = e, of_term
        self._new: dict[Node, Node] = {}
        self._free: dict[Node, bool] = {}

    def of(self, root: Node) -> Node:
        """The expression that takes the place of `root`."""
        nodes = order(root)
        precise = {
            a for n in nodes if n.op == "mul" for a, b in (n.args, n.args[::-1])
            if a.op == "tanh" and b.op == "const" and abs(b.value) >= _LARGE_CAP
        }  # fmt: skip
        for node in nodes:
            if node not in self._new:
                args = tuple(self._new[a] for a in node.args)
                self._new[node] = self._made(node, args, node in precise)
        return self._new[root]

    def _is_free(self, node: Node) -> bool:
        """Whether a value is the same for all scores of a tile."""
        for n in order(node, is_leaf=self._free.__contains__):
            if n not in self._free:
                if n.op == "argument":
                    self._free[n] = n.value in ("b", "h")
                elif n.op == "term":
                    self._free[n] = not self._of_term(n)
                else:
                    self._free[n] = all(self._free[a] for a in n.args)
        return self._free[node]

    def _number(self, value: float) -> Node:
        return self.e.constant(value, FLOAT)

    def _made(self, node: Node, args: tuple[Node, ...], is_precise: bool) -> Node:
        e, one = self.e, self._number(1.0)
        match node.op:
            case "argument" if node.value == "score":
                return e.make("mul", node, e.term(_SCALE, FLOAT))
            case "mul" if node.type == FLOAT:
                return self._times(*args)
            case "div":
                return self._divided(*args)
            case "tanh" if not is_precise:
                grown = e.make("exp2", self._times(args[0], self._number(2.0 / math.log(2.0))))
                part = e.make("div", one, e.make("add", grown, one))
                return e.make("sub", one, self._times(part, self._number(2.0)))
            case "sigmoid":
                grown = e.make("exp2", self._times(args[0], self._number(-1.0 / math.log(2.0))))
                return e.make("div", one, e.make("add", grown, one))
            case "exp":
                return e.make("exp2", self._times(args[0], self._number(1.0 / math.log(2.0))))
            case "log":
                return self._times(e.make("log2", args[0]), self._number(math.log(2.0)))
            case "to_float":
                return self._as_float(args[0])
        return node if not node.args or args == node.args else e.again(node, args)

    def _times(self, a: Node, b: Node) -> Node:
        """A product, whose second factor is that of the tile."""
        e = self.e
        if self._is_free(a):
            a, b = b, a
        if self._is_free(a) or not self._is_free(b):
            return e.make("mul", a, b)
        if a.op == "mul" and self._is_free(a.args[1]):
            return self._times(a.args[0], e.make("mul", a.args[1], b))
        if a.op == "sub" and a.args[0].op == "const":
            return e.make("sub", e.make("mul", a.args[0], b), self._times(a.args[1], b))
        return e.make("mul", a, b)

    def _divided(self, a: Node, b: Node) -> Node:
        one = self._number(1.0)
        if b.op == "const" and 2.0**-100 < abs(b.value) < 2.0**100:
            return self._times(a, self._number(1.0 / b.value))
        reciprocal = self.e.make("div", one, b)
        return reciprocal if a is one else self._times(a, reciprocal)

    def _as_float(self, x: Node) -> Node:
        """An integer as a float: of a distance the conversion is that of the block's first one."""
        sums = "const", "argument", "add", "sub", "neg"
        is_simple = x.type == INT and x.op in ("abs", "neg", "min", "max")
        if is_simple and all(a.op in sums for a in x.args):
            return self.e.make(x.op, *(self.e.cast(a, FLOAT) for a in x.args))
        return self.e.cast(x, FLOAT)


def _coefficients(form: Linear) -> tuple[int, int, dict[Node, int]]:
    """Those of query and key, and of the rest."""
    of = {n.value: x for n, x in form.factors.items() if n.op == "argument"}
    rest = {
        n: x for n, x in form.factors.items() if n.op != "argument" or n.value not in ("q", "k")
    }
    return of.get("q", 0), of.get("k", 0), rest


def _function(head: str, lines: Sequence[str]) -> str:
    return f"DEVICE {head} {{\n" + "".join(f"  {line}\n" for line in lines) + "}"


def _literal(node: Node) -> str:
    if node.type == BOOL:
        return str(node.value).lower()
    if node.type == INT:
        return f"({node.value})" if node.value > -_LIMIT else f"({1 - _LIMIT} - 1)"
    value = node.value
    if value != value:
        return "(INFINITE - INFINITE)"
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        rounded = math.copysign(math.inf, value)
    if abs(rounded) == math.inf:
        return "INFINITE" if rounded > 0 else "(-INFINITE)"
    return f"({rounded!r}f)"


def _operation(node: Node, args: list[str]) -> str:
    """A node as an expression of C++."""
    op = node.op
    if op in _BINARY:
        return f"{args[0]} {_BINARY[op]} {args[1]}"
    if op in ("floordiv", "mod"):
        return _floored(node, args)
    if op in ("min", "max"):
        return f"{'program_' * (node.type == FLOAT)}{op}({args[0]}, {args[1]})"
    if op == "detach":  # only derivatives differ
        return args[0]
    if op == "abs":
        return f"{'fabsf' if node.type == FLOAT else 'abs'}({args[0]})"
    if op in ("neg", "not", "bitnot"):
        return {"neg": "-", "not": "!", "bitnot": "~"}[op] + args[0]
    if op == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if op == "div":
        return f"reciprocal_fast({args[1]})"  # all others have become products
    if op == "tanh":
        return f"tanh_precise({args[0]})"
    if op in ("to_float", "to_int"):
        return f"({_TYPES[node.type]}){args[0]}"
    return f"{_CALLS[op]}({args[0]})"


def _floored(node: Node, args: list[str]) -> str:
    a, b = args
    divisor = node.args[1].value if node.args[1].op == "const" else 0
    sign = "/" if node.op == "floordiv" else "%"
    if divisor > 0 and divisor & (divisor - 1) == 0:
        return f"{a} >> {divisor.bit_length() - 1}" if sign == "/" else f"{a} & {divisor - 1}"
    if divisor > 0 and is_natural(node.args[0]):
        return f"(int)((unsigned){a} {sign} {divisor}u)"
    return f"program_{node.op}({a}, {b})"
