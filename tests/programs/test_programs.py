"""Functions become programs that compute the same: values, derivatives, text, refusals."""

from __future__ import annotations

import contextvars
import operator
import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

import fa_ops
from fa_ops.programs.evaluation import Elements
from fa_ops.programs.expressions import (
    FLOAT,
    INT,
    Expressions,
    derivatives,
    domains,
    linear_forms,
)
from fa_ops.programs.identity import identity_of
from fa_ops.programs.program import ScoreProgram, parse
from fa_ops.programs.reader import read
from fa_ops.programs.splitting import Prologue, split
from tests.functions.test_flex import dense, tensors
from tests.programs import functions as f

SIZES = (f.B, f.H, f.S, f.S)
CPU = torch.device("cpu")
RANDOM = int(os.environ.get("FA_OPS_PROGRAMS", "60"))


def split_of(function, score: bool, whole: bool = False):
    e, tensors = Expressions(), []
    what = "score_mod" if score else "mask_mod"
    root = read(function, what, e, CPU, torch.float64, tensors).root
    grads = [t.requires_grad for t in tensors]
    found = split(e, root if score else None, [] if score else [root], grads, what, whole=whole)
    return found, Prologue(found, tensors, SIZES, torch.float64, CPU)


def elements_of(program: ScoreProgram, prologue: Prologue, score: Tensor) -> Elements:
    b, h, q, k = f.indices()
    arguments = {"score": score, "b": b, "h": h, "q": q.long(), "k": k.long()}
    terms = program.views(*prologue.packed_terms(), *SIZES)
    whole = slice(0, f.S)
    return Elements(program, arguments, terms, whole, whole, f.S, torch.float64)


def computed(found, prologue: Prologue, score: Tensor) -> Tensor:
    """Scores, -inf where masked, as kernels are told to compute them."""
    _, _, i, j = f.indices()
    keep = torch.ones(SIZES, dtype=torch.bool)
    left, right = found.window
    if left is not None:
        keep = keep & (i - j <= left)
    if right is not None:
        keep = keep & (j - i <= right)
    ranges = prologue.key_ranges(found.lower, found.upper)
    if ranges is not None:
        keep = keep & (j >= ranges[..., :1]) & (j < ranges[..., 1:])
    if found.dense_mask is not None:
        keep = keep & prologue.of_pairs(found.dense_mask)
    if found.program is not None:
        program = parse(str(found.program))
        elements = elements_of(program, prologue, score)
        if program.mask is not None:
            keep = keep & elements.evaluate(program.mask)[0]
        if program.score is not None:
            (score,) = elements.evaluate(program.score)
    if found.bias is not None:
        score = score + prologue.of_pairs(found.bias)
    return score.expand(SIZES).masked_fill(~keep, -torch.inf)


def assert_equal(function, score: bool) -> None:
    x = torch.randn(SIZES, dtype=torch.float64)
    found, prologue = split_of(function, score)
    actual = computed(found, prologue, x)
    if score:
        expected = function(x, *f.indices()).expand(SIZES)
        torch.testing.assert_close(actual, expected.double(), atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(actual > -torch.inf, f.dense_mask(function))
    if found.program is not None:
        assert str(parse(str(found.program))) == str(found.program)


@pytest.mark.parametrize("name", f.MASKS)
def test_masks(name):
    assert_equal(f.MASKS[name], score=False)


@pytest.mark.parametrize("name", f.SCORES)
def test_scores(name):
    assert_equal(f.SCORES[name], score=True)


def test_random_functions():
    """Of which none may differ; most have a program, some of them with terms."""
    with_terms = 0
    for seed in range(RANDOM):
        torch.manual_seed(seed)
        for score in (False, True):
            function = f.random_function(seed, score)
            assert_equal(function, score)
            program = split_of(function, score)[0].program
            with_terms += program is not None and len(program.terms) > 0
    assert with_terms > RANDOM // 2


def test_derivatives():
    """By score and by terms those of autograd, of random programs."""
    compared = 0
    for seed in range(60):
        torch.manual_seed(seed)
        found, prologue = split_of(f.random_function(seed, True), score=True)
        program, x = found.program, torch.randn(SIZES, dtype=torch.float64, requires_grad=True)
        if program is None or program.score is None:
            continue
        elements = elements_of(program, prologue, x)
        floats = [i for i, term in enumerate(program.terms) if term.type == FLOAT]
        leaves = [x, *(elements.term(i).detach().expand(SIZES).requires_grad_() for i in floats)]
        elements._values.update(zip(floats, leaves[1:]))
        (out,) = elements.evaluate(program.score)
        if not out.requires_grad:
            continue
        expected = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
        e = program.expressions
        slopes = derivatives(
            e, program.score, [e.argument("score"), *(e.term(i, FLOAT) for i in floats)]
        )
        for slope, grad in zip(elements.evaluate(*slopes), expected, strict=True):
            grad = torch.zeros(SIZES) if grad is None else grad
            torch.testing.assert_close(slope.detach().expand(SIZES), grad.double())
            compared += 1
    assert compared > 80


@pytest.mark.parametrize("rows, columns", [(5, 3), (1, 4), (7, 7)])
def test_sums_over_terms(rows, columns):
    lines = "\n".join(
        f"t{i} float {d} -" for i, d in enumerate(("tile", "row", "column", "distance"))
    )
    text = f"fa1\n{lines}\nx0 add(t0, t1)\nx1 add(t2, t3)\nx2 add(x0, x1)\nscore x2\n"
    program, grads = parse(text), torch.randn(2, rows, columns)
    elements = Elements(program, {}, [], slice(0, rows), slice(0, columns), columns, torch.float32)
    by_distance = torch.zeros(2, rows + columns - 1)
    for r in range(rows):
        for c in range(columns):
            by_distance[:, r - c + columns - 1] += grads[:, r, c]
    expected = grads.sum((1, 2)).unsqueeze(-1), grads.sum(2), grads.sum(1), by_distance
    for i, total in enumerate(expected):
        torch.testing.assert_close(elements.summed(grads, i), total)


# What a function depends on.


def test_terms_and_programs():
    found, _ = split_of(f.SCORES["gates"], score=True)
    assert str(found.program) == (
        "fa1; t0 float column bh grad; t1 float row bh grad; "
        "x0 add(score, t1); x1 sub(x0, t0); score x1"
    )
    found, _ = split_of(f.SCORES["t5"], score=True)
    assert [str(term) for term in found.program.terms] == ["float distance h grad"]
    found, _ = split_of(f.MASKS["window"], score=False)
    assert found.window == (19, 0) and found.program is None
    found, _ = split_of(f.MASKS["chunks"], score=False)
    assert found.program is None and found.upper is not None
    found, _ = split_of(f.MASKS["blocks of heads"], score=False)
    assert [str(term) for term in found.program.terms] == ["int blocks:16x16 h"]
    found, _ = split_of(f.SCORES["bias of pairs"], score=True)
    assert found.program is None and found.bias is not None
    found, _ = split_of(f.SCORES["softcap and alibi"], score=True)
    assert found.softcap == 2.0 and found.slopes is not None


def test_domains_and_sums():
    e = Expressions()
    q, k, one = e.argument("q"), e.argument("k"), e.constant(1, INT)
    by_distance = e.make("abs", e.make("sub", e.make("add", q, one), k))
    of = domains([by_distance, e.make("mul", q, k), e.make("add", k, k)])
    assert [of[n] for n in (by_distance, e.make("mul", q, k), e.make("add", k, k))] == [
        "distance", "dense", "column"
    ]  # fmt: skip
    form = linear_forms(e.make("sub", e.make("mul", q, e.constant(3, INT)), e.make("add", q, one)))
    assert list(form.values())[-1] == ({q: 2}, -1)


def test_functions_are_told_apart():
    def make(n, t):
        return lambda s, b, h, i, j: s * n + t[h]

    t, other = torch.randn(4), torch.randn(4)
    key = identity_of(make(1.0, t)).key
    assert key == identity_of(make(1.0, other)).key and key is not None
    assert key != identity_of(make(2.0, t)).key
    assert key != identity_of(make(1.0, torch.randn(5))).key
    assert key != identity_of(make(1, t)).key
    assert identity_of(make(1.0, other)).tensors[0] is other

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.window = torch.nn.Parameter(torch.randn(4)), 3

        def score(self, s, b, h, i, j):
            return torch.where(i - j < self.window, s + self.bias[h], self.lowest())

        def lowest(self):
            return -float("inf")

    model = Model()
    first = identity_of(model.score)
    assert first.key is not None and first.tensors[0] is model.bias
    model.window = 4
    assert identity_of(model.score).key != first.key


def test_functions_that_libraries_make_are_told_apart_by_what_they_capture():
    """The address of such a function may be that of an earlier one."""

    def make(n, t=None):
        inner = lambda b, h, i, j: i - j < (n if t is None else t[h])  # noqa: E731
        return and_masks(lambda b, h, i, j: i >= j, inner)

    t = torch.ones(4, dtype=torch.int32)
    first = identity_of(make(3)).key
    assert first == identity_of(make(3)).key != identity_of(make(4)).key
    assert identity_of(make(3, t)).tensors[0] is t
    pick = operator.itemgetter(0)
    assert identity_of(lambda s, b, h, i, j: pick((s, i))).key is None


def test_a_global_number_is_part_of_the_identity():
    space = {"torch": torch}
    exec("N = 3\ndef mask(b, h, i, j): return i - j < N", space)
    first = identity_of(space["mask"]).key
    space["N"] = 4
    assert identity_of(space["mask"]).key != first


def of_holder(holder, i, j):
    return i - j < holder.window


def of_itself(b, h, i, j):
    return i - j < of_itself.window


def ways_to_a_number() -> dict[str, tuple]:
    """Functions, and what changes the number that they read."""

    class Base:
        window = 3

        def __call__(self, b, h, i, j):
            return i - j < self.read()

        def read(self):
            return self.window

        @classmethod
        def of_class(cls):
            return cls.window

        def __getitem__(self, name):
            return self.entries[name]

        def __int__(self):
            return self.window

        tripled = property(lambda self: 3 * self.window)

    class Derived(Base):
        pass

    class Lazy:
        def __init__(self):
            self._found = {"window": 3}

        def __getattr__(self, name):
            return self.__dict__["_found"][name]

    x, lazy, space, numbers = Derived(), Lazy(), SimpleNamespace(window=3), [3]
    x.window, x.entries, of_itself.window = 3, {"window": 3}, 3
    modules = torch.nn.ModuleList([torch.nn.LeakyReLU(0.1)])
    modules[0].window, leaky, first = 3, modules[0], numbers.__getitem__
    now = contextvars.ContextVar("now", default=3)

    def set_window(holder):
        return lambda: setattr(holder, "window", 4)

    return {
        "class": (lambda b, h, i, j: i - j < Derived.window, set_window(Base)),
        "class method": (lambda b, h, i, j: i - j < Derived.of_class(), set_window(Base)),
        "inherited call": (x, set_window(x)),
        "called object": (lambda b, h, i, j: x(b, h, i, j), set_window(x)),
        "property": (lambda b, h, i, j: i - j < x.tripled, set_window(x)),
        "operation": (lambda b, h, i, j: i - j < int(x), set_window(x)),
        "element": (lambda b, h, i, j: i - j < x["window"], lambda: x.entries.update(window=4)),
        "getattr": (lambda b, h, i, j: i - j < getattr(space, "window"), set_window(space)),  # noqa: B009
        "handed on": (lambda b, h, i, j: of_holder(space, i, j), set_window(space)),
        "function": (of_itself, set_window(of_itself)),
        "made": (lambda b, h, i, j: i - j < lazy.window, lambda: lazy._found.update(window=4)),
        "bound in C": (lambda b, h, i, j: i - j < first(0), lambda: numbers.__setitem__(0, 4)),
        "module in a list": (lambda b, h, i, j: i - j < modules[0].window, set_window(leaky)),
        "module of torch": (
            lambda s, b, h, i, j: leaky(s),
            lambda: setattr(leaky, "negative_slope", 0.2),
        ),
        "context": (lambda b, h, i, j: i - j < now.get(), lambda: now.set(4)),
    }


@pytest.mark.parametrize("way", ways_to_a_number())
def test_a_number_is_part_of_the_identity_however_it_is_read(way):
    function, change = ways_to_a_number()[way]
    first = identity_of(function).key
    assert first == identity_of(function).key and (first is None) == (way == "context")
    change()
    assert first is None or identity_of(function).key != first


def test_attributes_that_functions_do_not_read_are_no_part_of_the_identity():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.window = torch.nn.Linear(4, 4), 3

        def forward(self, x):
            self.project(x)
            return lambda b, h, i, j: i - j < self.window

    attention = Attention()
    mask = attention(torch.randn(1, 4))
    first = identity_of(mask)
    attention.steps = 1
    assert first == identity_of(mask) and first.key is not None and first.tensors == ()


# Text.

TEXT = "fa1\nt0 float row bh\nx0 add(score, t0)\nscore x0\n"


@pytest.mark.parametrize(
    "old, new",
    [
        ("fa1", "fa2"), ("t0 float row bh", "t0 float row hb"), ("t0", "t1"), ("row", "rows"),
        ("x0 add(score, t0)", "x0 add(score, t0, t0)"), ("add", "system"), ("add", "__import__"),
        ("x0 add(score, t0)", "x0 add(score, 1)"), ("x0 add(score, t0)", "x0 add(score, x0)"),
        ("score x0\n", "mask x0\n"), ("score x0\n", ""),
        ("score x0\n", "score x0\nscore x0\n"), ("add(score, t0)", "add(score, t0); }"),
        ("add(score, t0)", "add(score, 1e999x)"), ("x0 add(score, t0)", "x0 neg(score)"),
        ("t0 float row bh", "t0 int row bh grad"), ("t0 float row bh", "t0 int blocks:0x8 -"),
        ("x0 add(score, t0)", "x1 add(score, t0)"), ("x0 add(score, t0)", "x0 load0(score, t0)"),
        ("x0 add(score, t0)\nscore x0\n", "x0 lt(score, t0)\nmask x0\n"), ("fa1\n", "fa1\n\n"),
    ],
)  # fmt: skip
def test_other_text_is_refused(old, new):
    assert parse(TEXT).score is not None
    assert old in TEXT and str(parse(TEXT)) == TEXT.strip().replace("\n", "; ")
    with pytest.raises(ValueError, match="program"):
        parse(TEXT.replace(old, new))


def test_too_much_text_is_refused():
    lines = [f"x{i} add({'score' if i == 0 else f'x{i - 1}'}, score)" for i in range(5000)]
    with pytest.raises(ValueError, match="at most"):
        parse("\n".join(["fa1", *lines, "score x4999", ""]))


def test_constants_survive_as_text():
    numbers = (0.1, -1e-30, 1e30, float("inf"), -0.0, 3.0, 2.0**-149)
    score = lambda s, b, h, i, j: sum((torch.where(i == n, x, s) for n, x in enumerate(numbers)), s)  # noqa: E731
    found, _ = split_of(score, score=True)
    program = parse(str(found.program))
    kept = [n.value for n in f_order(program) if n.op == "const" and n.type == FLOAT]
    assert all(any(str(x) == str(y) for y in kept) for x in numbers)


def f_order(program):
    from fa_ops.programs.expressions import order

    return order(*program.roots)


# Refusals, each with the name of the function, its file and line.

T = torch.randn(4, 96)
REFUSED = {
    "if": (lambda s, b, h, i, j: s if i > j else s * 2, "depends on a value"),
    "and": (lambda s, b, h, i, j: torch.where((i > j) and (h > 1), s, 0.0), "use torch.where, &"),
    "item": (lambda s, b, h, i, j: s * T[0, 0].item(), "by item()"),
    "float": (lambda s, b, h, i, j: s * float(h), "on the host"),
    "range": (lambda s, b, h, i, j: sum(T[h, n] for n in range(i)) + s, "on the host"),
    "part": (lambda s, b, h, i, j: s + T[h].sum(), "whole tensor of shape (96,) by sum"),
    "slice": (lambda s, b, h, i, j: s + T[h, :4][i], "by a slice"),
    "float index": (lambda s, b, h, i, j: s + T[h, i / 2], "by a float"),
    "bool index": (lambda s, b, h, i, j: s + T[h, i > 2], "by a bool"),
    "too many": (lambda s, b, h, i, j: s + T[h, i, j], "indices"),
    "random": (lambda s, b, h, i, j: s + torch.rand(()), "random"),
    "random like": (lambda s, b, h, i, j: s + torch.rand_like(s), "random"),
    "writes": (lambda s, b, h, i, j: s + T.add_(1.0)[h, i], "whole tensor"),
    "sets": (lambda s, b, h, i, j: T.__setitem__((0, 0), 1.0), "writes"),
    "tuple": (lambda s, b, h, i, j: (s, s), "must return a tensor"),
    "number": (lambda s, b, h, i, j: 1.0, "must return a tensor"),
    "vector": (lambda s, b, h, i, j: T[h], "got a tensor of shape"),
    "numpy": (lambda s, b, h, i, j: s + T.numpy()[0, 0], "array"),
    "complex": (lambda s, b, h, i, j: s + torch.zeros(3, dtype=torch.complex64)[h], "complex64"),
    "unknown": (lambda s, b, h, i, j: torch.digamma(s), "calls digamma"),
    "view": (lambda s, b, h, i, j: s + T.view(96, 4)[i, h], "shape (4, 96) by view"),
    "flattened": (lambda s, b, h, i, j: s + T.flatten()[i], "whole tensor of shape"),
    "whole": (lambda s, b, h, i, j: s + (T * 2)[h, i], "whole tensor"),
    "dense": (lambda s, b, h, i, j: torch.tanh(s + f.PAIR_BIAS[h, i, j]), "inside a function"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    function, message = REFUSED[name]
    with pytest.raises((NotImplementedError, TypeError, IndexError)) as caught:
        split_of(function, score=True)
    text = str(caught.value)
    assert message in text
    if name != "dense":
        assert "score_mod '<lambda>' (test_programs.py, line" in text


def test_a_mask_is_a_bool():
    message = r"mask_mod '.*<lambda>' \(test_programs.py, line \d+\) must return a bool, got int"
    with pytest.raises(TypeError, match=message):
        split_of(lambda b, h, i, j: i - j, score=False)


def test_a_line_inside_a_helper_is_named():
    def helper(x):
        return x.item()

    line = helper.__code__.co_firstlineno + 1
    with pytest.raises(NotImplementedError, match=f"test_programs.py, line {line}"):
        split_of(lambda s, b, h, i, j: helper(s), score=True)


def test_parts_without_gradients():
    """By no_grad inside a function; an autograd.Function, which has its own, is refused."""
    q, k, v = tensors(torch.float64)
    w = torch.randn(f.S, dtype=torch.float64, requires_grad=True)

    def score_mod(s, b, h, i, j):
        with torch.no_grad():
            gate, number = torch.sigmoid(s), w[j]
        return s * gate + number * w[i]

    found = fa_ops.flex_attention(q, k, v, score_mod)
    expected = dense(q, k, v, score_mod)
    grad = torch.randn_like(found)
    grads = (torch.autograd.grad(x, (q, k, v, w), grad) for x in (found, expected))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.round(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    straight = lambda s, b, h, i, j: Straight.apply(s)  # noqa: E731
    with torch.no_grad():
        out = fa_ops.flex_attention(q, k, v, straight)
        torch.testing.assert_close(out, dense(q, k, v, straight), atol=1e-6, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="calls an autograd.Function, whose backward"):
        fa_ops.flex_attention(q, k, v, straight)
