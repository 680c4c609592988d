"""Drawings of masks, packed sequences, pages and a ring. Masks are what the operator computes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fa_ops
from fa_ops.distributed.layout import zigzag_layout
from tests.evaluation.plots.svg import Drawing

WIDTH = 600
SIDE = 20  # of a square of a mask
SERIES = ("fill0", "fill1", "fill2", "fill3")


def _attended(queries: int, keys: int, **options) -> Tensor:
    """Which keys each query attends: with equal scores and one-hot values, weights are results."""
    q, k = torch.zeros(1, 1, queries, 8), torch.zeros(1, 1, keys, 8)
    return fa_ops.attention(q, k, torch.eye(keys)[None, None], backend="cpu", **options)[0, 0] > 0


def _matrix(drawing: Drawing, x: float, y: float, head: str, mask: Tensor, note: str) -> float:
    """A mask with its head above and a note below; returns the y below it."""
    drawing.text(x, y, head, "panel")
    for i, row in enumerate(mask.tolist()):
        for j, attends in enumerate(row):
            style = "fill0" if attends else "track"
            drawing.bar(x + j * SIDE, y + 12 + i * SIDE, SIDE - 3, SIDE - 3, style)
    below = y + 12 + len(mask) * SIDE + 14
    drawing.text(x, below, note, "faint")
    return below


def _headed(title: str, words: str) -> Drawing:
    drawing = Drawing(WIDTH, title, words)
    drawing.text(16, 30, title, "title")
    drawing.text(16, 52, words, "faint")
    return drawing


def alignment(_results: object) -> Drawing:
    """Causal masks of two queries and five keys: fa_ops and SDPA."""
    drawing = _headed(
        "is_causal with 2 queries and 5 keys",
        "A row for each query; filled: the query attends the key",
    )
    ours = _attended(2, 5, is_causal=True)
    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 5, 8)
    theirs = scaled_dot_product_attention(q, k, torch.eye(5)[None, None], is_causal=True)[0, 0] > 0
    _matrix(drawing, 16, 88, "fa_ops", ours, "bottom right: the last attends all")
    _matrix(drawing, 316, 88, "SDPA", theirs, "top left: the first attends one")
    return drawing


def masks(_results: object) -> Drawing:
    """Masks of eight queries and eight keys, by the options that make them."""
    drawing = _headed(
        "Masks and the options that make them",
        "8 queries and 8 keys; filled: the query attends the key",
    )
    i = torch.arange(8)
    documents = torch.tensor([0, 0, 0, 3, 3, 3, 3, 3])
    ranges = {
        "documents": torch.stack([documents, i + 1], -1),
        "prefix": torch.stack([torch.zeros_like(i), (i + 1).clamp(min=4)], -1),
        "padding": torch.stack([torch.full_like(i, 2), (i + 1).clamp(min=2)], -1),
    }
    ranges = {name: r.int()[None, None] for name, r in ranges.items()}
    lengths = torch.tensor([5], dtype=torch.int32)
    panels = [
        ("is_causal=True", {"is_causal": True}, "causal"),
        ("window=(2, 0)", {"is_causal": True, "window": (2, 0)}, "causal, 2 keys back"),
        ("window=(1, 1)", {"window": (1, 1)}, "1 key to each side"),
        ("kv_lens=[5]", {"kv_lens": lengths}, "5 keys, then padding"),
        ("key_ranges", {"key_ranges": ranges["documents"]}, "documents of 3 and 5"),
        ("key_ranges", {"key_ranges": ranges["prefix"]}, "a prefix of 4 for all"),
        ("key_ranges", {"key_ranges": ranges["padding"]}, "2 keys of left padding"),
        ("key_ranges, window", {"key_ranges": ranges["documents"], "window": (1, 0)}, "both"),
    ]
    drawn = [(head, _attended(8, 8, **options), note) for head, options, note in panels]
    drawn.append(("is_causal=True", _attended(4, 8, is_causal=True), "4 queries, 8 keys"))
    for n, (head, mask, note) in enumerate(drawn):
        column, row = n % 3, n // 3
        _matrix(drawing, 16 + column * 200, 88 + row * (8 * SIDE + 62), head, mask, note)
    return drawing


def packed(_results: object) -> Drawing:
    """Sequences in a padded batch and packed one after another, with their boundaries."""
    lengths = (3, 6, 2)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    drawing = _headed(
        "A packed batch: (T, H, D) and cu_seqlens",
        "Sequences of 3, 6 and 2 tokens; grey squares are padding",
    )
    side = 30
    drawing.text(16, 84, "padded: 3 rows of 6 tokens", "panel")
    for row, length in enumerate(lengths):
        for j in range(max(lengths)):
            style = SERIES[row] if j < length else "track"
            drawing.bar(16 + j * side, 96 + row * side, side - 4, side - 4, style)
    drawing.text(16, 220, f"packed: T = {ends[-1]} tokens", "panel")
    token = 0
    for row, length in enumerate(lengths):
        for _ in range(length):
            drawing.bar(16 + token * side, 232, side - 4, side - 4, SERIES[row])
            token += 1
    for end in ends.tolist():
        drawing.text(14 + end * side, 278, str(end), anchor="middle" if end else "start")
    drawing.text(16, 300, f"cu_seqlens = {ends.tolist()}", "faint")
    mask = _packed_mask(lengths, ends)
    drawing.text(380, 84, "what attends what, causal", "panel")
    for i, line in enumerate(mask.tolist()):
        for j, attends in enumerate(line):
            row = int(torch.searchsorted(ends, i, right=True)) - 1
            style = SERIES[row] if attends else "track"
            drawing.bar(380 + j * 18, 96 + i * 18, 15, 15, style)
    return drawing


def _packed_mask(lengths: tuple[int, ...], ends: Tensor) -> Tensor:
    total = sum(lengths)
    zeros = torch.zeros(total, 1, 16)
    values = torch.eye(total)[:, None]
    return fa_ops.attention_varlen(zeros, zeros, values, ends, ends, is_causal=True)[:, 0] > 0


def pages(_results: object) -> Drawing:
    """Two requests whose tokens lie in pages of a pool, and the table that names the pages."""
    size, table, lengths = 4, [[5, 1, 2], [0, 3]], [10, 7]
    drawing = _headed(
        "A paged cache: (pages, page_size, Hkv, D) and page_table",
        "Two requests with 10 and 7 tokens in pages of 4",
    )
    drawing.text(16, 88, "page_table", "panel")
    drawing.text(16, 178, "kv_lens = [10, 7]", "faint")
    for row, names in enumerate(table):
        drawing.text(16, 117 + row * 32, f"request {row}")
        for column in range(3):
            x = 100 + column * 34
            drawing.bar(x, 98 + row * 32, 30, 28, SERIES[row] if column < len(names) else "track")
            if column < len(names):
                drawing.text(x + 15, 117 + row * 32, str(names[column]), "inverse", "middle")
    drawing.text(260, 88, "the pool, which all requests share", "panel")
    owner = {page: (row, n) for row, names in enumerate(table) for n, page in enumerate(names)}
    for page in range(6):
        x, y = 260 + page % 3 * 112, 98 + page // 3 * 76
        row, n = owner.get(page, (None, 0))
        for slot in range(size):
            token = n * size + slot
            held = row is not None and token < lengths[row]
            style = SERIES[row] if held else "track"
            drawing.bar(x + slot * 25, y, 22, 28, style)
            if held:
                drawing.text(x + slot * 25 + 11, y + 19, str(token), "inverse", "middle")
        drawing.text(x, y + 46, f"page {page}" + ("" if row is not None else ", free"), "faint")
    return drawing


def ring(_results: object) -> Drawing:
    """Four processes: which keys each attends in each step, and the tokens that each holds."""
    n = 4
    drawing = _headed(
        "A ring of 4 processes",
        "In each step a process attends the keys of one, and passes them on",
    )
    for step in range(n):
        drawing.text(152 + step * 112, 88, f"step {step}", "panel", "middle")
    for process in range(n):
        y = 98 + process * 34
        drawing.text(16, y + 20, f"process {process}")
        for step in range(n):
            source = (process - step) % n
            drawing.bar(100 + step * 112, y, 104, 28, SERIES[source])
            words = f"keys of {source}"
            drawing.text(152 + step * 112, y + 19, words, "inverse", "middle")
    y = 270
    drawing.text(16, y, "Tokens of a causal sequence, layout zigzag", "panel")
    parts = zigzag_layout(4 * n, n).segments
    owner = {t: r for r in range(n) for part in parts[r] for t in range(*part)}
    for token in range(4 * n):
        drawing.bar(16 + token * 35, y + 12, 31, 28, SERIES[owner[token]])
        drawing.text(31.5 + token * 35, y + 31, str(owner[token]), "inverse", "middle")
    drawing.text(16, y + 60, "Each process has an early and a late part.", "faint")
    return drawing
