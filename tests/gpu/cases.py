"""Numbered cases for the Hopper kernels: all head dimensions and memory layouts of masks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from fa_ops.backends import hopper, reference
from fa_ops.backends.hopper import backward, decode, eight_bit, forward, kernel_plan, mla
from fa_ops.call.call import Call
from fa_ops.plans import dispatch, planning
from fa_ops.testing import Case, PackedCase, assert_close_to_oracle, random_case

DIMS = ((64, 64), (128, 128), (96, 96), (72, 72), (128, 64), (192, 128), (192, 192), (256, 256))
UNBOUNDED = 1 << 20


def check(case: Case | PackedCase, gradients: bool = True) -> None:
    """Compare with the oracle, forward and backward; skip cases that the backend refuses."""
    call = case.fresh()
    reason = hopper.support_error(call)
    if reason:
        pytest.skip(reason)
    assert_close_to_oracle(case, "hopper", gradients=gradients)


def chosen(call: Call) -> ModuleType:
    """The backend of a call."""
    return dispatch.choose(planning.normalised(call))


@contextlib.contextmanager
def few_processors(count: int) -> Iterator[None]:
    """Report fewer multiprocessors, so that persistent CTAs process several tiles each."""
    real = torch.cuda.get_device_properties

    def properties(device: object) -> SimpleNamespace:
        actual = real(device)
        return SimpleNamespace(multi_processor_count=count, major=actual.major, minor=actual.minor)

    with mock.patch.object(torch.cuda, "get_device_properties", properties):
        _clear_plans()
        yield
    _clear_plans()


@contextlib.contextmanager
def pairs_of_ctas() -> Iterator[None]:
    """Backward passes of D 256 by pairs of CTAs, also where two passes are faster."""
    with mock.patch.object(backward, "prefers_pairs", lambda *args: True):
        _clear_plans()
        yield
    _clear_plans()


@contextlib.contextmanager
def all_tiles() -> Iterator[None]:
    """Kernels that visit all tiles between the first and the last that `mask_blocks` list."""
    with (
        mock.patch.object(forward, "skipped_lists", lambda spec: None),
        mock.patch.object(backward, "skipped_lists", lambda spec: None),
    ):
        _clear_plans()
        yield
    _clear_plans()


def _clear_plans() -> None:
    """Drop plans that another number of processors, or another kernel, was chosen for."""
    planning.forget()
    for module in (decode, backward, forward, mla, eight_bit, kernel_plan):
        for name in ("_plan", "_packed_plan", "split_kv_plan", "_template", "kernel_of"):
            if hasattr(module, name):
                getattr(module, name).cache_clear()


def hopper_case(seed: int, **fixed) -> Case:
    """A random case; the seed cycles through head dimensions and dtypes."""
    D, Dv = DIMS[seed % len(DIMS)]
    dtype = (torch.bfloat16, torch.float16)[seed // len(DIMS) % 2]
    return random_case(seed, **{"D": D, "Dv": Dv, "dtype": dtype, "device": "cuda"} | fixed)


def lengthened(case: Case) -> Case:
    """The case with up to 5 times as many queries and 7 times as many keys."""
    seed = case.seed
    return dataclasses.replace(case, Sq=case.Sq * (1 + seed % 5), Sk=case.Sk * (1 + seed % 7))


def _inside(mask, *margins):
    """The mask as a slice of a larger tensor that is true outside the slice."""
    size = [n + before + after for n, (before, after) in zip(mask.shape, margins)]
    part = mask.new_ones(size)
    for dim, (before, _) in enumerate(margins):
        part = part.narrow(dim, before, mask.shape[dim])
    return part.copy_(mask)


def _in_rows_of_16(mask):
    return _inside(mask, (0, 0), (0, 0), (0, 2), (0, -mask.shape[3] % 16))


MASK_LAYOUTS = {
    "contiguous": lambda mask: mask,
    "transposed": lambda mask: mask.mT.contiguous().mT,
    "heads before batches": lambda mask: mask.transpose(0, 1).contiguous().transpose(0, 1),
    "odd rows": lambda mask: _inside(mask, (0, 1), (1, 0), (1, 2), (3, 8)),
    "rows of 16 bytes": _in_rows_of_16,
    "transposed rows of 16 bytes": lambda mask: _in_rows_of_16(mask.mT).mT,
    "every second": lambda mask: mask.repeat_interleave(2, -1)[..., ::2],
}  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class MaskedCase(Case):
    """A case with a mask in one of `MASK_LAYOUTS`."""

    mask: str | None = "bool"
    band: tuple[int, int] = (-UNBOUNDED, UNBOUNDED)  # keys j of query i that a bool mask may keep
    is_wide: bool = False  # a float mask in float32
    mask_layout: str = "contiguous"
    expanded: bool = False  # broadcast dimensions have full size and stride 0

    def fresh(self, dtype=None, requires_grad=False):
        call = super().fresh(dtype, requires_grad)
        mask = call.operands.attn_mask.detach()
        if self.is_wide:
            mask = mask.float() * 1.2345
        if self.mask == "bool":
            i, j = (torch.arange(n, device=mask.device) for n in mask.shape[2:])
            shift = j - i[:, None]
            mask = mask & (shift >= self.band[0]) & (shift < self.band[1])
        mask = MASK_LAYOUTS[self.mask_layout](mask)
        if self.expanded:
            mask = mask.expand(self.B, self.Hq, self.Sq, self.Sk)
        mask.requires_grad_(requires_grad and self.mask_grad)
        if self.mask_blocks:
            call = call.changed(mask_blocks=reference.mask_blocks(mask))
        return call.changed(attn_mask=mask)


def _layout_fields(seed: int) -> dict:
    layout = list(MASK_LAYOUTS)[seed % len(MASK_LAYOUTS)]
    return {"mask_layout": layout, "expanded": seed % 11 < 3}


def masked_case(seed: int, **fixed) -> MaskedCase:
    """Seeds below 256 cover every mask shape for every head dimension, deterministic or not."""
    dims, shape, deterministic = seed % len(DIMS), seed // len(DIMS) % 16, seed // 128 % 2
    is_causal = bool((dims + shape + deterministic) % 2)
    return MaskedCase(
        B=2, Hq=4, Hkv=(1, 2, 4)[seed % 3], Sq=(1, 64, 77, 300)[seed // 3 % 4],
        Sk=(15, 256, 400, 701, 130)[seed % 5], D=DIMS[dims][0], Dv=DIMS[dims][1],
        dtype=torch.float16 if is_causal else torch.bfloat16, device="cuda", seed=seed,
        mask_shape=tuple(shape >> bit & 1 for bit in range(4)),
        is_causal=is_causal, deterministic=bool(deterministic),
        window=(100, -1) if is_causal and shape % 3 == 0 else (-1, -1),
        **_layout_fields(seed), **fixed,
    )  # fmt: skip


def random_masked_case(seed: int, mask: str, fixed: dict, **mask_fields) -> MaskedCase:
    """A random masked case; `fixed` overrides drawn fields, `mask_fields` those of `MaskedCase`."""
    case = hopper_case(
        seed, Sq=(1, 200, 400)[seed % 3], Sk=(15, 256, 700)[seed // 3 % 3], mask=mask,
        mask_shape=tuple(seed >> bit & 1 for bit in range(4)), dropout_p=0.0, scale=None, **fixed,
    )  # fmt: skip
    return MaskedCase(**vars(case), **_layout_fields(seed), **mask_fields)


def dropout_case(seed: int) -> Case:
    """Every head dimension, deterministic or not, without a mask, with a bool or a float mask."""
    mask = (None, "bool", "float", None, "bool", "float", None)[seed % 7]
    no_ranges = {"key_ranges": None} if mask == "bool" else {}
    case = hopper_case(
        seed, dtype=(torch.bfloat16, torch.float16)[seed // 16 % 2], mask=mask,
        mask_shape=tuple(seed >> bit & 1 for bit in range(4)),
        mask_grad=mask == "float" and seed % 5 < 3, dropout_p=(0.1, 0.5, 0.9, 1 / 3)[seed // 2 % 4],
        deterministic=bool(seed // 8 % 2), **no_ranges,
    )  # fmt: skip
    return lengthened(case)
