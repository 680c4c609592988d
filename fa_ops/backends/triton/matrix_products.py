"""Device functions that multiply tiles.

Operands are tuples: of one tensor three times, or of three bfloat16 tensors whose sum is a float32
one. PRECISION says how: "ieee" and "tf32" as in tl.dot; "split" in such parts, by tensor cores,
exact to float32's rounding; "joined" as float32 from parts in memory.
"""

import triton
import triton.language as tl

from fa_ops.backends.triton.primitives import INLINE, load_rows


@triton.jit
def load_parts(
    at, part, stride, first, last, width, ROWS: tl.constexpr, COLS: tl.constexpr,
    EDGE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """An operand of `product` from rows that `load_rows` loads; `part` elements between parts,
    whose columns are COLS."""
    if PRECISION == "split" or PRECISION == "joined":
        x = load_rows(at, stride, first, last, COLS, ROWS, COLS, EDGE, True)
        y = load_rows(at + part, stride, first, last, COLS, ROWS, COLS, EDGE, True)
        z = load_rows(at + 2 * part, stride, first, last, COLS, ROWS, COLS, EDGE, True)
        return operand(x, y, z, PRECISION)
    else:
        x = load_rows(at, stride, first, last, width, ROWS, COLS, EDGE, EXACT)
        return x, x, x


@triton.constexpr_function
def exact_precision(precision):
    """The precision of rows that are recomputed: NaN and Inf have no parts."""
    return "joined" if precision == "split" else precision


@triton.jit
def rounded(x):
    """float32 rounded to the nearest bfloat16, to even."""
    if INLINE:
        return x.to(tl.bfloat16)
    else:  # the interpreter multiplies no bfloat16
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def parts(x, like, PRECISION: tl.constexpr):
    """An operand of `product` from a tile that was computed, in float32 or the dtype of `like`."""
    if PRECISION == "split":
        high = rounded(x)
        rest = x - high.to(tl.float32)
        middle = rounded(rest)
        return high, middle, rounded(rest - middle.to(tl.float32))
    else:
        x = x.to(like.dtype)
        return x, x, x


@triton.jit
def joined(x, PRECISION: tl.constexpr):
    """The tensor that an operand stands for."""
    if PRECISION == "split":
        return x[0].to(tl.float32) + (x[1].to(tl.float32) + x[2].to(tl.float32))
    else:
        return x[0]


@triton.jit
def operand(x, y, z, PRECISION: tl.constexpr):
    """An operand of `product` from three parts in memory."""
    if PRECISION == "joined":
        x = joined((x, y, z), "split")
        return x, x, x
    else:
        return x, y, z


@triton.jit
def transposed(x):
    """An operand of `product`, transposed."""
    return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])


@triton.jit
def divided(x, never):
    """The product x, divided over all warps; `never` is a condition that does not hold.

    Where Triton sees that a product is an operand of another one, it gives each warp 16 rows of its
    own. Of a tile with fewer rows, the other warps would compute the same rows again. Behind a
    branch it does not see that, and divides the columns too.
    """
    if never:
        x = -x
    return x


@triton.jit
def product(x, y, acc, PRECISION: tl.constexpr, never=False):
    """The matrix product of two operands, plus acc unless it is None; `never` as in `divided`.

    Tensor cores truncate sums. So the small terms are added first, of which three, below 2**-26 of
    the product, are left out, and acc is added at last, in float32.
    """
    if PRECISION == "split":
        s = divided(tl.dot(x[2], y[0]), never)
        s = divided(tl.dot(x[1], y[1], s), never)
        s = divided(tl.dot(x[1], y[0], s), never)
        s = divided(tl.dot(x[0], y[2], s), never)
        s = divided(tl.dot(x[0], y[1], s), never)
        s = tl.dot(x[0], y[0], s)
        return s if acc is None else acc + s
    elif PRECISION == "joined":
        return tl.dot(x[0], y[0], acc, input_precision="ieee")
    else:
        return tl.dot(x[0], y[0], acc, input_precision=PRECISION)
