"""Which strided tensors share memory, against a map of all bytes."""

from __future__ import annotations

import random

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fa_ops.call import cache_memory

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64)


def marked(t: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Bool (bytes,), True for those of the tensor's elements."""
    used = torch.zeros(len(storage), dtype=torch.bool)
    size, strides = t.itemsize, [stride * t.itemsize for stride in t.stride()]
    at = t.storage_offset() * size
    used.as_strided((*t.shape, size), (*strides, 1), at).fill_(True)
    return used


def view(memory: torch.Tensor, r: random.Random) -> torch.Tensor:
    """A view of a buffer of bytes, whose dimensions may be interleaved, expanded or overlap."""
    x = memory.view(r.choice(DTYPES))
    shape = [r.choice([1, 1, 2, 3, 5]) for _ in range(r.randint(1, 4))]
    strides, extent = [], 1
    for size in shape:  # mostly without overlaps, in any order of dimensions
        strides.append(r.choice([0, 1, extent, extent, extent + r.randint(0, 4)]))
        extent += strides[-1] * (size - 1)
    if extent > x.numel():
        return x
    order = r.sample(range(len(shape)), len(shape))
    shape, strides = ([n[i] for i in order] for n in (shape, strides))
    return x.as_strided(shape, strides, r.randint(0, x.numel() - extent))


def test_shared_bytes_are_found_exactly():
    found = {True: 0, False: 0}
    for seed in range(3000):
        r = random.Random(seed)
        memory = torch.empty(r.choice([64, 192, 320]), dtype=torch.uint8)
        read, written = view(memory, r), view(memory, r)
        storage = memory.untyped_storage()
        if cache_memory.has_overlaps(written):
            continue
        bytes_written = marked(written, storage)
        assert int(bytes_written.sum()) == written.numel() * written.itemsize
        expected = bool((marked(read, storage) & bytes_written).any())
        assert cache_memory.share_memory(read, written) == expected, (read.shape, written.shape)
        found[expected] += 1
    assert min(found.values()) > 300


def test_memory_is_found_by_address():
    """Two storages may hold the same bytes."""
    array = torch.zeros(64).numpy()
    a, b, c = (torch.from_numpy(part) for part in (array[:40], array[30:], array[40:]))
    assert cache_memory.share_memory(a, b) and not cache_memory.share_memory(a, c)


def test_no_temporary_grows_with_what_is_written():
    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.numel = max(getattr(self, "numel", 0), result.numel())
            return result

    memory = torch.empty(2, 2000, 3, 32)
    written, beside, across = memory[..., :16], memory[:, :7, :, 16:], memory[:, :7, :, 15:20]
    with Largest() as largest:
        assert not cache_memory.share_memory(beside, written)
        assert cache_memory.share_memory(across, written)
    assert largest.numel <= 2 * 7 * 3
