"""Generates `wgmma.cuh`: the warpgroup matrix products of a kernel, for its tile sizes.

Each product is a pair of functions: `NAME_start` overwrites the accumulator, `NAME` adds to it. One
whose sums start now and then is a single function, `NAME_if`, which adds unless its last argument
is 0. The operands' layouts are those of CUTLASS: a K-major operand has the inner dimension
contiguous, an MN-major one is transposed.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAJOR_K, _MAJOR_MN = 0, 1


def header(source: str, defines: dict[str, int]) -> str:
    """The products that a source file calls, as C++."""
    if source == "quantized.cu":
        return "".join(wgmma(*product) for product in _eight_bit_products(defines))
    dtype = "bf16" if defines.get("IS_BF16") else "f16"
    return "".join(
        wgmma(name, n, dtype, a, b, *rest) for name, n, a, b, *rest in _products(source, defines)
    )


def wgmma(
    name: str, n: int, dtype: str, a: str | int, b: int, steps: Sequence[tuple[int, int]],
    b_group: int = 1024, is_conditional: bool = False,
) -> str:  # fmt: skip
    """Wrappers of `wgmma.mma_async` for a 64 x n accumulator.

    Args:
        name: of the wrappers.
        n: columns of the accumulator.
        dtype: PTX type of both operands. 8-bit ones are K-major; those of s8 have sums in s32.
        a: "registers", or the major dimension of an operand in shared memory.
        b: the major dimension of operand b.
        steps: byte offsets of a and b for each 32 bytes of the inner dimension. All steps are one
            statement, because NVRTC takes an eighth longer over one statement each.
        b_group: bytes from 8 rows of b to the next 8; 512: rows are 64 bytes.
        is_conditional: whether to return `NAME_if` alone.
    """
    count, words = n // 2, 4 * len(steps) if a == "registers" else 0
    accumulator = ", ".join(f"%{i}" for i in range(count))
    is_wide, is_integer = dtype in ("bf16", "f16"), dtype == "s8"
    sums, depth = ("s32" if is_integer else "f32"), (16 if is_wide else 32)
    operation = f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{sums}.{dtype}.{dtype}"
    kind, constraint = ("u32", "r") if is_integer else ("float", "f")
    bases = count + words  # the operands after the accumulator and the registers of a
    base_b, high = (bases, bases + 1) if words else (bases + 1, bases + 2)

    def descriptor(to: str, base: int, offset: int, group: int = 1024) -> str:
        swizzle = 1 << 30 if group != 8 * 64 else 1 << 31
        word = f"%{high}" if group == 1024 else f"{swizzle | group >> 4}"
        return f"add.u32 x, %{base}, {offset // 16}; mov.b64 {to}, {{x, {word}}};"

    def step(i: int, starts: bool) -> str:
        adds = f"%{high + 1}" if is_conditional and i == 0 else int(not (starts and i == 0))
        setup = f"setp.ne.b32 p, {adds}, 0;"
        if words:
            operand_a = "{" + ", ".join(f"%{count + 4 * i + k}" for k in range(4)) + "}"
            majors = f"{b}"
        else:
            operand_a, majors = "a", f"{a}, {b}"
            setup += descriptor("a", bases, steps[i][0])
        signs = "" if is_integer else ", 1, 1" + f", {majors}" * is_wide
        return (
            f'  "{setup} {descriptor("b", base_b, steps[i][1], b_group)} "\n'
            f'  "{operation} {{{accumulator}}}, {operand_a}, b, p{signs}; "\n'
        )

    def function(suffix: str, starts: bool) -> str:
        text = "".join(step(i, starts) for i in range(len(steps)))
        outputs = ", ".join(f'"{"=" if starts else "+"}{constraint}"(d[{i}])' for i in range(count))
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(words)) or '"r"(a)'
        first = f"const u32 (&a)[{words}]" if words else "u32 a"
        argument, last = (", u32 adds", ', "r"(adds)') if is_conditional else ("", "")
        return (
            f"DEVICE void {name}{suffix}({kind} (&d)[{count}], {first}, u32 b{argument}) {{\n"
            f'  asm volatile("{{ .reg .pred p; .reg .b32 x; .reg .b64 a, b; "\n{text}  "}}"\n'
            f'  : {outputs} : {inputs}, "r"(b), "n"(DESCRIPTOR_HIGH){last});\n}}\n'
        )

    if is_conditional:
        return function("_if", False)
    return function("_start", True) + function("", False)


def _products(source: str, defines: dict[str, int]) -> list[tuple]:
    """Arguments of `wgmma`, without the dtype, for each product of a source file."""
    D = defines.get("HEAD_FEATURES", defines["HEAD_DIM"])
    Dv = defines.get("VALUE_FEATURES", defines["VALUE_DIM"])
    M, N = defines.get("BLOCK_M", 0), defines["BLOCK_N"]
    scores = _MAJOR_K, _MAJOR_K
    registers = "registers", _MAJOR_MN
    if source == "forward.cu" and defines.get("WHOLE_ROWS"):
        columns = defines["HEAD_DIM"] // 64, defines["VALUE_DIM"] // 64
        return [
            ("wgmma_scores", N, *scores, _features(D, 64, 8), columns[0] * 1024),
            ("wgmma_output", Dv, *registers, _rows(N, b_step=columns[1] * 2048), columns[1] * 1024),
        ]
    if source in ("forward.cu", "tangent.cu"):
        return [
            ("wgmma_scores", N, *scores, _features(D, 64, N)),
            ("wgmma_output", Dv, *registers, _rows(N)),
        ]
    if source in ("mla.cu", "forward_wide.cu"):
        # a column of 64 features; all keys of a tile and half of the values
        return [
            ("wgmma_scores", N, *scores, _features(64, 64, N)),
            ("wgmma_output", Dv // 2, *registers, _rows(N)),
            ("wgmma_other_output", Dv // 2, _MAJOR_K, _MAJOR_MN, _rows(N, a_step=32)),
        ]
    if source in ("backward_queries.cu", "backward_mask.cu"):
        N = defines["QUERY_BLOCK_N"]
        return [
            ("wgmma_row_scores", N, *scores, _features(D, 64, N)),
            ("wgmma_row_value_scores", N, *scores, _features(Dv, 64, N)),
            ("wgmma_query_grads", D, *registers, _rows(N)),
        ]
    if source == "backward_pair.cu":  # a CTA has half the keys, and half the columns of dQ
        keys, half = N // 2, defines["HEAD_DIM"] // 2
        return [
            ("wgmma_scores", M, *scores, _features(D, keys, M)),
            ("wgmma_value_scores", M, *scores, _features(Dv // 2, keys, M)),
            ("wgmma_half_grads", half, *registers, _rows(M)),
            ("wgmma_queries", 64, _MAJOR_MN, _MAJOR_MN, _rows(keys, a_step=2048)),
        ]
    if source == "backward_wide.cu":  # half the features; a quarter of a gradient's columns
        return [
            ("wgmma_first_scores", N, "registers", _MAJOR_K, _features(D // 2, 64, N)),
            ("wgmma_scores", N, *scores, _features(D // 2, 64, N)),
            ("wgmma_grads", D // 4, _MAJOR_K, _MAJOR_MN, _rows(N, a_step=32)),
        ]
    products = [
        ("wgmma_scores", M, *scores, _features(D, N, M)),
        ("wgmma_value_scores", M, *scores, _features(Dv, N, M)),
        ("wgmma_grads", D, *registers, _rows(M)),
    ]
    if source == "backward_keys.cu":
        return [*products, ("wgmma_value_grads", Dv, *registers, _rows(M))]
    # of 128 queries a consumer has half the rows of dQ; of 64 queries half the columns, or every
    # second block
    columns = defines["SUM_FEATURES"]
    columns = columns if defines["ALTERNATES"] else columns * M // 128
    steps = _rows(N, a_step=2048)
    return [*products, ("wgmma_queries", columns, _MAJOR_MN, _MAJOR_MN, steps)]


def _eight_bit_products(defines: dict[str, int]) -> list[tuple]:
    """Arguments of `wgmma` for quantized.cu, whose tiles are columns of 128 bytes."""
    D, Dv, N = defines["HEAD_FEATURES"], defines["VALUE_FEATURES"], defines["BLOCK_N"]
    offsets = [(i // 4 * 128, i % 4 * 32) for i in range(-(-D // 32))]
    features = [(column * 64 + x, column * N + x) for column, x in offsets]
    dtype = "s8" if defines["IS_INT8"] else "e4m3"
    return [
        ("wgmma_scores", N, dtype, _MAJOR_K, _MAJOR_K, features),
        (
            "wgmma_output",
            Dv + 8 * defines["SUMS_BY_PRODUCT"],
            "e4m3",
            "registers",
            _MAJOR_K,
            _keys(N),
            8 * N,
            True,
        ),
    ]


def _keys(count: int) -> list[tuple[int, int]]:
    """Offsets for each 32 keys; the first operand is in registers."""
    return [(0, 32 * i) for i in range(count // 32)]


def _features(count: int, a_rows: int, b_rows: int) -> list[tuple[int, int]]:
    """Steps over features: tiles are columns of 64 features, of `a_rows` and `b_rows` rows.

    The last step may read zeros beyond the features.
    """
    offsets = [(d // 4 * 64 * 128, d % 4 * 32) for d in range(-(-count // 16))]
    return [(column * a_rows // 64 + x, column * b_rows // 64 + x) for column, x in offsets]


def _rows(count: int, a_step: int = 0, b_step: int = 2048) -> list[tuple[int, int]]:
    """Steps over rows of 64 features, for an MN-major operand b."""
    return [(a_step * i, b_step * i) for i in range(count // 16)]
