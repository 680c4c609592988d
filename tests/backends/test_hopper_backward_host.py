"""A backward call of the Hopper tier on the host: CPU tensors, a driver that takes notes, and the
kernels' parameters as their sources declare them."""

import contextlib
import ctypes
import re
import struct

import pytest
import torch

from fa_ops.backends.hopper import compiler, dense_backward, launch
from fa_ops.types import Spec

SOURCE = "".join((compiler._SOURCES / name).read_text() for name in ("backward.cuh", "backward.cu"))


def declared(kernel: str) -> dict[str, tuple[int, str]]:
    """Each parameter's offset and struct format, laid out as C does."""
    found, at = {}, 0
    text = re.search(rf"\b{kernel}\(((?:const )?\w+\*[^)]*)\)", SOURCE)[1]
    for parameter in text.split(","):
        kind, name = re.fullmatch(r"\s*(?:const )?(.*?)\s*(\w+)\s*", parameter).groups()
        code = "Q" if "*" in kind else {"Strides": "3q", "int": "i", "float": "f"}[kind]
        size = struct.calcsize("<" + code)
        at += -at % min(size, 8)
        found[name], at = (at, code), at + size
    return found


@pytest.mark.parametrize(
    "kernel, head, offsets",
    [
        ("prepare", dense_backward._PREPARE, dense_backward._PREPARE_OFFSETS),
        ("finish", dense_backward._FINISH, dense_backward._FINISH_OFFSETS),
        ("keep_runs", dense_backward._RUNS, dense_backward._RUNS_OFFSETS),
    ],
)
def test_parameters_lie_where_the_source_declares_them(kernel, head, offsets):
    parameters = declared(kernel)
    assert list(offsets) == [at for at, _ in parameters.values()]
    codes = [code for _, code in parameters.values()]
    addresses = next(i for i, code in enumerate(codes) if code != "Q")
    assert head.size == 8 * addresses


class Driver:
    """Notes what each kernel was launched with."""

    def __init__(self):
        self.launched = {}

    def note(self, name, grid, pointers):
        self.launched[name] = grid, self.read(name, pointers)
        return 0

    def read(self, name, pointers):
        if name not in ("prepare", "finish", "keep_runs"):
            return ctypes.string_at(pointers[0], dense_backward._PARAMS_BYTES)
        found = {}
        for i, (parameter, (_, code)) in enumerate(declared(name).items()):
            packed = ctypes.string_at(pointers[i], struct.calcsize("<" + code))
            found[parameter] = struct.unpack("<" + code, packed)
        return found

    def cuLaunchKernel(self, function, x, y, z, *rest):
        return self.note(function, (x, y), rest[-2])

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        return self.note(function, tuple(config._obj.grid)[:2], pointers)

    def cuTensorMapEncodeTiled(self, out, dtype, rank, where, *rest):
        ctypes.memmove(out, struct.pack("<Q", where) * 16, 128)
        return 0


def empty(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype)


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(launch, "driver", lambda: fake)
    monkeypatch.setattr(compiler, "cubins", lambda kind, entries, defines: entries)
    monkeypatch.setattr(launch, "_load", lambda code, entry: launch.Kernel(code, 128, 0))
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(launch, "on_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(dense_backward, "on_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(dense_backward, "current_stream", lambda index: 77)
    monkeypatch.setattr(dense_backward, "empty", empty)
    caches = dense_backward._plan, dense_backward._kernels, launch._early
    for one in caches:
        one.cache_clear()
    yield fake
    for one in caches:
        one.cache_clear()


def tensors(B, Hq, Hkv, Sq, Sk, D):
    q, k, v = (
        torch.zeros(B, S, H, D, dtype=torch.bfloat16).transpose(1, 2)
        for H, S in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk))
    )
    out = torch.zeros(B, Hq, Sq, D, dtype=torch.bfloat16)
    return torch.zeros_like(out), q, k, v, out, torch.zeros(B, Hq, Sq)


@pytest.mark.parametrize("D, block", [(64, 128), (128, 64)])
def test_each_kernel_finds_its_tensors_and_sizes(driver, D, block):
    g, q, k, v, out, lse = tensors(2, 4, 2, 200, 300, D)
    grads = dense_backward.backward(g, None, q, k, v, out, lse, Spec(is_causal=True))
    assert [x.stride() for x in grads[:3]] == [x.stride() for x in (q, k, v)]
    grid, rows = driver.launched["prepare"]
    assert grid == (8, 4) and rows["rows"] == (256,)
    assert (rows["out"], rows["grad_out"], rows["lse"], rows["grad_lse"]) == (
        (out.data_ptr(),), (g.data_ptr(),), (lse.data_ptr(),), (0,),
    )  # fmt: skip
    assert rows["o"] == out.stride()[:3] and rows["d"] == g.stride()[:3]
    assert (rows["Hq"], rows["Sq"], rows["Dv"]) == ((4,), (200,), (D,))
    grid, products = driver.launched["backward"]
    assert grid == (3 * 2 * 2, 1)
    maps = [struct.unpack_from("<Q", products, 128 * i)[0] for i in range(7)]
    assert maps == [x.data_ptr() for x in (q, k, v, g, *grads[:3])]
    places = struct.unpack_from("<7Q", products, 896)
    assert places[:3] == (*rows["lse_log2"], *rows["delta"], *rows["sums"])
    numbers = struct.unpack_from("<14i4f", products, 952)
    assert numbers[:6] == (2, 4, 2, 2, 200, 300) and numbers[8:10] == (256 // block, 3)
    assert numbers[14] == pytest.approx(D**-0.5)
    grid, last = driver.launched["finish"]
    assert grid == (256 // block * 8, 1)
    assert (last["to"], last["sums"]) == ((grads[0].data_ptr(),), rows["sums"])
    assert last["q"] == grads[0].stride()[:3] and last["m_blocks"] == (256 // block,)
    assert last["scale"] == (pytest.approx(D**-0.5),)


def test_key_ranges_and_lengths(driver):
    g, q, k, v, out, lse = tensors(2, 4, 2, 200, 300, 64)
    lens = torch.tensor([300, 100], dtype=torch.int32)
    ranges = torch.zeros(2, 1, 200, 2, dtype=torch.int32)
    spec = Spec(kv_lens=lens, key_ranges=ranges, window_left=7)
    dense_backward.backward(g, None, q, k, v, out, lse, spec)
    grid, runs = driver.launched["keep_runs"]
    assert grid == (2, 2)
    assert (runs["ranges"], runs["kv_lens"]) == ((ranges.data_ptr(),), (lens.data_ptr(),))
    assert runs["r"] == (400, 0, 2) and (runs["Sq"], runs["Sk"], runs["left"]) == (
        (200,),
        (300,),
        (7,),
    )
    places = struct.unpack_from("<7Q", driver.launched["backward"][1], 896)
    assert places[3] == lens.data_ptr() and places[5:] == (*runs["runs"], *runs["bounds"])
    assert runs["bounds"][0] - runs["runs"][0] == 2 * 256 * 8


def test_a_later_call_has_its_own_mask(driver, monkeypatch):
    g, q, k, v, out, lse = tensors(1, 2, 2, 64, 64, 64)
    monkeypatch.setattr(
        dense_backward, "bits_by_key", lambda mask: mask.view(torch.uint8)[None, None]
    )
    masks = [torch.ones(64, 64, dtype=torch.bool) for _ in range(2)]
    for mask in masks:
        dense_backward.backward(g, None, q, k, v, out, lse, Spec(attn_mask=mask))
        _, products = driver.launched["backward"]
        assert struct.unpack_from("<Q", products, 1024)[0] == mask.data_ptr()
