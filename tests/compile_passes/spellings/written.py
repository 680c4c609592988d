"""Writes to a part of the scores by index: masks, and biases of some queries and keys."""

from __future__ import annotations

import torch

from tests.compile_passes.cases import INF, MIN, B, D, H, S, bhsd, randn, registry, triangle

CASES, case = registry()


def with_bias():
    """A bias of all queries and keys but the first."""
    return (*bhsd()(), randn(H, S - 1, S - 1))


@case("fuse", bhsd())
def written_by_a_bool_mask(q, k, v):
    s = q @ k.mT * 0.3
    s[:, :, ~triangle()] = -INF
    return s.softmax(-1) @ v


@case("fuse", bhsd())
def written_by_a_mask_of_all(q, k, v):
    s = q @ k.mT
    s *= 0.3
    s[(~triangle()).expand(B, H, S, S)] = MIN
    return s.softmax(-1) @ v


@case("fuse", bhsd())
def written_columns(q, k, v):
    s = q @ k.mT * 0.3
    s[..., 9:] = -INF
    return s.softmax(-1) @ v


@case("fuse", bhsd())
def written_twice(q, k, v):
    """The first query attends only itself, and no query attends the last two keys."""
    s = q @ k.mT * 0.3
    s[:, :, 0, 1:] = -INF
    s[..., -2:] = -INF
    return s.softmax(-1) @ v


@case("fuse", with_bias)
def written_bias(q, k, v, bias):
    s = q @ k.mT * 0.3
    s[:, :, 1:, 1:] += bias
    return s.softmax(-1) @ v


@case("fuse", lambda: (*bhsd()(), randn(B, H, S - 1, 1), randn(B, H, S - 1, 1)))
def written_decomposed_bias(q, k, v, rows, columns):
    """As in MViTv2: positions for all tokens but the first."""
    s = q @ k.mT * 0.3
    s[:, :, 1:, 1:] = (s[:, :, 1:, 1:].view(B, H, 11, 1, 11) + rows[..., None]).view(
        B, -1, S - 1, S - 1
    ) + columns.mT
    return s.masked_fill(~triangle(), -INF).softmax(-1) @ v


@case("no_fuse", bhsd())
def written_from_another_row(q, k, v):
    s = q @ k.mT * 0.3
    s[:, :, 0] = s[:, :, 1]
    return s.softmax(-1) @ v


@case("no_fuse", with_bias)
def written_from_other_positions(q, k, v, bias):
    s = q @ k.mT * 0.3
    s[:, :, 1:, 1:] = s[:, :, :-1, :-1] + bias
    return s.softmax(-1) @ v


@case("no_fuse", lambda: (*bhsd()(), randn(B, H, 1, S - 1)))
def written_rows_are_repeated(q, k, v, bias):
    s = q @ k.mT * 0.3
    s[:, :, 1:, 1:] = s[:, :, :1, 1:] + bias
    return s.softmax(-1) @ v


@case("no_fuse", bhsd())
def a_part_is_scaled(q, k, v):
    s = q @ k.mT
    s[:, :, 1:, 1:] *= 0.3
    return s.softmax(-1) @ v


@case("no_fuse", bhsd())
def a_view_sees_the_write(q, k, v):
    s = q @ k.mT * 0.3
    t = s.transpose(1, 2)
    s[:, :, ~triangle()] = -INF
    return s.softmax(-1) @ v + t.amax(-1, keepdim=True).transpose(1, 2)


@case("no_fuse", bhsd())
def written_and_returned(q, k, v):
    s = q @ k.mT * 0.3
    s[..., 9:] = -1e9
    return s.softmax(-1) @ v, s


@case("no_fuse", bhsd())
def written_through_a_view(q, k, v):
    s = q @ k.mT * 0.3
    s.view(B * H, S, S)[:, 0] = s.view(B * H, S, S)[:, 1]
    return s.softmax(-1) @ v


@case("no_fuse", lambda: (*bhsd()(), torch.arange(3)))
def written_by_numbers_of_rows(q, k, v, rows):
    s = q @ k.mT * D**-0.5
    s[:, :, rows] = -1e9
    return s.softmax(-1) @ v


@case("fuse", lambda: (*bhsd()(), randn(B, H, 3, 4, 3), randn(B, H, 3, 4, 4)))
def written_everywhere(q, k, v, rows, columns):
    s = q @ k.mT * 0.3
    s[:, :, 0:, 0:] = (
        s[:, :, 0:, 0:].view(B, -1, 3, 4, 3, 4) + rows.unsqueeze(-1) + columns.unsqueeze(-2)
    ).view(B, -1, 12, 12)
    return s.softmax(-1) @ v


@case("fuse", bhsd())
def written_number_of_a_tensor(q, k, v):
    s = q @ k.mT * 0.3
    hidden = (~triangle()).expand(s.shape)
    s[hidden] = torch.tensor(-INF)
    return s.softmax(-1) @ v


@case("fuse", bhsd())
def filled_diagonal(q, k, v):
    """No query attends itself."""
    s = q @ k.mT * 0.3
    torch.diagonal(s, dim1=-2, dim2=-1).fill_(-INF)
    return s.softmax(-1) @ v


@case("fuse", lambda: (randn(S, D), randn(7, D), randn(7, D)))
def filled_diagonal_above(q, k, v):
    s = q @ k.mT * 0.3
    s.diagonal(2).fill_(-INF)
    return s.softmax(-1) @ v


@case("fuse", bhsd())
def diagonal_of_a_mask(q, k, v):
    hidden = torch.zeros(S, S, dtype=torch.bool)
    torch.diagonal(hidden).fill_(True)
    return (q @ k.mT * 0.3).masked_fill(hidden, -INF).softmax(-1) @ v


@case("no_fuse", lambda: (randn(B, S, S, D), randn(B, S, S, D), randn(B, S, S, D)))
def diagonal_of_other_dimensions(q, k, v):
    s = q @ k.mT * 0.3
    s.diagonal(dim1=1, dim2=2).fill_(-INF)
    return s.softmax(-1) @ v


@case("no_fuse", bhsd())
def diagonal_that_is_read(q, k, v):
    s = q @ k.mT * 0.3
    d = torch.diagonal(s, dim1=-2, dim2=-1)
    d.fill_(-1.0)
    return s.softmax(-1) @ v + d[..., None]


@case("fuse", bhsd())
def filled_part(q, k, v):
    s = q @ k.mT * 0.3
    s[..., 9:].fill_(-INF)
    s[:, :, 0, 1:].fill_(-INF)
    return s.softmax(-1) @ v


@case("fuse", with_bias)
def bias_added_to_a_part(q, k, v, bias):
    s = q @ k.mT * 0.3
    s[:, :, 1:, 1:].add_(bias)
    return s.softmax(-1) @ v


@case("fuse", lambda: (*bhsd()(), randn(S, S)))
def masked_through_views(q, k, v, bias):
    """Scores are read by both names afterwards, and a copy made before keeps its numbers."""
    s = q @ k.mT
    flat = s.view(B * H, S, S)
    flat.mul_(0.3)
    flat += bias
    s.transpose(-1, -2).masked_fill_(~triangle().mT, -INF)
    return flat.softmax(-1).view(s.shape) @ v


@case("fuse", bhsd())
def masked_by_a_permuted_name(q, k, v):
    s = q @ k.mT * 0.3
    t = s.permute(1, 0, 3, 2).unsqueeze(0)
    t = t.masked_fill_(~triangle().mT, MIN)
    return t.squeeze(0).permute(1, 0, 3, 2).softmax(-1) @ v


@case("no_fuse", bhsd())
def a_selection_is_a_copy(q, k, v):
    """Indexing by a list copies: the scores are not masked, but read elsewhere."""
    s = q @ k.mT * 0.3
    return s.softmax(-1) @ v + s[:, :, [0, 1]].fill_(1.0).sum()


@case("no_fuse", bhsd())
def another_name_is_read(q, k, v):
    s = q @ k.mT * 0.3
    rows = s.view(B * H, S, S)[:, 0]
    s.view(B * H, S, S).mul_(0.5)
    return s.softmax(-1) @ v + rows.view(B, H, S, 1)


@case("no_fuse", bhsd())
def a_part_is_filled_and_read(q, k, v):
    s = q @ k.mT * 0.3
    return s.softmax(-1) @ v + s[..., :8].fill_(1.0)
