"""Float masks on the Hopper backend without a GPU: what kernels read, how a gradient is summed."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

from fa_ops.backends import reference
from fa_ops.backends.hopper import backward, forward
from fa_ops.backends.hopper import backward as gradients
from fa_ops.backends.hopper.configs import MaskGradientConfig, backward_config
from fa_ops.backends.hopper.masks import ROWS, Bias, bits_of
from fa_ops.backends.hopper.runtime import structs
from fa_ops.call.options import Spec

FULL = (2, 3, 70, 144)
MASKS = {
    "rows of 16 bytes": (torch.randn(2, 3, 70, 144), True),
    "one for all": (torch.randn(70, 144), True),
    "heads before batches": (torch.randn(3, 2, 70, 144).transpose(0, 1), True),
    "aligned slice": (torch.randn(2, 3, 80, 160)[:, :, 3:73, 8:152], True),
    "expanded": (torch.randn(2, 1, 70, 144).expand(2, 3, 70, 144), True),
    "odd slice": (torch.randn(2, 3, 80, 160)[:, :, 3:73, 7:151], False),
    "transposed": (torch.randn(2, 3, 144, 70).mT, False),
    "every second": (torch.randn(70, 288)[:, ::2], False),
    "of keys": (torch.randn(2, 1, 1, 144), False),
    "of queries": (torch.randn(1, 3, 70, 1), False),
    "expanded padding": (torch.randn(2, 1, 1, 144).expand(2, 3, 70, 144), False),
    "one element": (torch.randn(1), False),
    "16 bits": (torch.randn(70, 144).bfloat16(), True),
    "16 bits, odd rows": (torch.randn(70, 148).bfloat16()[:, :144], False),
}  # fmt: skip


@pytest.mark.parametrize("form", MASKS)
def test_what_kernels_read(form):
    mask, in_place = MASKS[form]
    bias, held = Bias.of(mask)
    assert (held.data_ptr() == mask.data_ptr()) == in_place
    assert bits_of(mask) == held.element_size() * 8
    assert bias.shape == held.shape and bias.strides == held.stride()
    b, h, i, j = torch.meshgrid(*map(torch.arange, FULL), indexing="ij")
    found = held[tuple(x * step for x, step in zip((b, h, i, j), bias.steps))]
    assert torch.equal(found, mask.expand(FULL))
    # what a tile reads that stands for all lies in it, and so does a pair at the last column
    assert bias.steps[2] or held.shape[2] == ROWS
    assert bias.steps[3] or held.shape[3] == 128
    assert held.shape[3] - 2 <= bias.last_column < held.shape[3]
    assert held.data_ptr() % 16 == 0
    unit = 16 // held.element_size()
    assert all(s % unit == 0 for n, s in zip(held.shape[:3], held.stride()) if n > 1)


def test_missing_and_bool_masks_are_no_bias():
    assert bits_of(None) == bits_of(torch.ones(3, 3, dtype=torch.bool)) == 0


def test_packed_parameters_are_those_of_the_kernel():
    mask = torch.randn(2, 1, 70, 144)
    bias, held = Bias.of(mask, reference.mask_blocks(mask))
    packed = bias.packed({4096: b"m" * 128}, 4096, 8192, unit=0.25)
    steps = held.stride(0) * 4, 0, 144 * 4
    lists = 8192, 4 * (1 * 3 + 2 * 2), 0, 1, 2  # address, strides, tiles
    fields = 4096, *steps, 1, 0, 1, 1, 142, 0.25, *lists
    assert packed[128:] == struct.pack("<QqqqiiiiifQqqii40x", *fields)
    assert len(packed) == 256


class FakeKernel:
    """cuda/backward_mask.cu, given every score's gradient: sums of tiles, from memory to memory."""

    def __init__(self, scores, config):
        self.scores, self.rows, self.columns = scores, config.rows, config.columns

    def launch(self, grid, stream, pointers):
        to, split_step, b, h, row, column, *ints = struct.unpack(
            "<Q5q6i", ctypes.string_at(pointers[1], 72)
        )
        *sums, steps, narrow = ints
        self.grid, self.steps = grid[0], steps
        B, H, Sq, Sk = self.scores.shape
        counts = (B, H, -(-Sq // self.rows), -(-Sk // self.columns))
        tiles, loop = (
            torch.tensor([n for n, s in zip(counts, sums) if bool(s) == kept]).prod().int().item()
            for kept in (False, True)
        )
        kind, size = ("e", 2) if narrow else ("f", 4)
        for cta in range(grid[0]):
            split, tile = divmod(cta, tiles)
            total = torch.zeros(self.rows, self.columns)
            for step in range(split * steps, min(loop, split * steps + steps)):
                at = self.digits(counts, sums, tile, step)
                part = self.scores[at[0], at[1]][self.span(at[2], self.rows)]
                part = part[:, self.span(at[3], self.columns)]
                total[: part.shape[0], : part.shape[1]] += part
            at = self.digits(counts, sums, tile, split * steps)
            i0 = 0 if sums[2] else at[2] * self.rows
            j0 = 0 if sums[3] else at[3] * self.columns
            for i in range(self.rows):
                for j in range(self.columns):
                    if (sums[2] or i0 + i < Sq) and (sums[3] or j0 + j < Sk):
                        index = split * split_step + at[0] * b + at[1] * h
                        index += (i0 + i) * row + (j0 + j) * column
                        value = struct.pack(kind, total[i, j].item())
                        ctypes.memmove(to + index * size, value, size)

    @staticmethod
    def span(block, size):
        return slice(block * size, block * size + size)

    @staticmethod
    def digits(counts, sums, tile, step):
        found = [0, 0, 0, 0]
        for dim in (3, 2, 1, 0):
            if sums[dim]:
                step, found[dim] = divmod(step, counts[dim])
            else:
                tile, found[dim] = divmod(tile, counts[dim])
        return found


@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.parametrize("shape", [(2, 3, 150, 70), (150, 70), (2, 1, 1, 70), (3, 150, 1), (1,)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_gradients_are_summed(shape, layout, processors, monkeypatch):
    mask = torch.zeros(shape, dtype=torch.float16)
    if layout == "transposed" and len(shape) > 1:
        mask = mask.mT.contiguous().mT
    scores = torch.randint(-4, 5, (2, 3, 150, 70)).float()
    fake = FakeKernel(scores, MaskGradientConfig(backward_config(64, 64)))
    monkeypatch.setattr(gradients, "kernel", lambda *_: fake)
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    q, k = torch.empty(2, 3, 150, 64), torch.empty(2, 3, 70, 64)
    params = ctypes.create_string_buffer(8)
    found = gradients.mask_gradient(mask, q, k, backward_config(64, 64), (), params, 0)
    assert found.dtype == mask.dtype and found.stride() == torch.empty_like(mask).stride()
    assert torch.equal(found, scores.sum_to_size(shape).half())


@pytest.mark.parametrize(
    "kernel, source", [("forward", "forward_rows.cuh"), ("backward", "backward_tiles.cuh")]
)
def test_kernels_find_the_mask_in_their_parameters(driver, kernel, source):
    name = f"{kernel.title()}Params"
    layout = structs.struct_layout(source, name)
    driver.struct_bytes = layout.size
    q, mask = torch.randn(1, 2, 40, 64).half(), torch.randn(40, 40).half()
    blocks = reference.mask_blocks(mask[None, None])
    spec = Spec(attn_mask=mask[None, None], mask_blocks=blocks)
    out, lse = forward.forward(q, q, q, spec)
    if kernel == "backward":
        backward.backward(out, None, q, q, q, out, lse, spec, False)
    data = driver.last(kernel)[1][layout.fields["bias"].offset :]
    address, steps = struct.unpack_from("<Q", data), struct.unpack_from("<Q3q", data, 128)
    assert address == (mask.data_ptr(),) and steps == (mask.data_ptr(), 0, 0, 80)
    lists = structs.struct_layout("masks.cuh", "Bias").fields["blocks"].offset
    assert struct.unpack_from("<Q2q2i", data, lists) == (blocks.data_ptr(), 0, 0, 1, 1)
