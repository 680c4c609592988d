"""Simplification of conditions and choices."""

from compile_passes.masks.affine import Affine, AtMost, Choice, at_most, choose, negate


def variable(name: str) -> Affine:
    return Affine.variable(name)


def test_long_chains_of_choices_take_quadratic_time():
    """The ends of packed documents give such chains; simplification must not be exponential."""
    chosen = Affine.from_size(0)
    for i in range(60):
        chosen = choose(AtMost(variable(f"end {i}")), Affine.from_size(i + 1), chosen)
    for i in reversed(range(60)):
        assert chosen.condition == AtMost(variable(f"end {i}"))
        assert chosen.yes == Affine.from_size(i + 1)
        chosen = chosen.no
    assert chosen == Affine.from_size(0)


def test_nested_choices_drop_known_conditions():
    a, b = AtMost(variable("a")), AtMost(variable("b"))
    one, two, three = (Affine.from_size(n) for n in (1, 2, 3))
    inner = choose(b, choose(a, one, two), three)
    assert choose(a, inner, three) == Choice(a, Choice(b, one, three), three)
    assert choose(negate(a), inner, three) == Choice(negate(a), Choice(b, two, three), three)
    assert choose(a, choose(a, one, two), choose(a, three, one)) == one
    assert choose(at_most(Affine.from_size(-1)), one, two) == one


def test_choices_of_conditions_are_conditions():
    a, b = AtMost(variable("a")), AtMost(variable("b"))
    inner = Choice(b, Choice(a, True, Affine.from_size(7)), False)
    assert choose(a, inner, False) == Choice(a, b, False)
