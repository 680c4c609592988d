"""Every launch of the Hopper backend's host code in two checkouts, without a GPU:

    python -m tests.backends.hopper.compare_launches ../before .

Each checkout runs the same named and random calls on CPU tensors, in a process of its own, with a
driver that takes notes. Compared are the kernels with their macros, grids, blocks, shared memory,
attributes and streams, every byte of the parameters with addresses as tensor and offset, tensor
maps among them, and the results' layouts. Fails if a call differs.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import functools
import hashlib
import importlib
import inspect
import itertools
import os
import pickle
import pkgutil
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
import typer
from torch import Tensor

import fa_ops
from fa_ops.backends import hopper
from fa_ops.backends.hopper import runtime
from fa_ops.backends.hopper.runtime import launch, nvrtc, structs
from fa_ops.call.backend_option import use_backend
from fa_ops.call.call import Call
from fa_ops.functions import varlen_quantized
from fa_ops.plans import dispatch, planning
from fa_ops.testing import Case, PackedCase, quantized, random_calls
from fa_ops.testing.budget import by_operator
from fa_ops.testing.caches import CacheCase

DTYPES = torch.bfloat16, torch.float16
PROCESSORS = 132, 4  # of the device: with few of them tiles are handed out on demand
Run = Callable[[], object]


class Tensors:
    """The memory of all tensors whose addresses a call has taken, which it keeps alive."""

    def __init__(self) -> None:
        self._held: dict[int, torch.UntypedStorage] = {}
        self._names: dict[int, str] = {}

    def note(self, t: Tensor) -> None:
        """Keep a tensor's memory."""
        if t.device.type == "cpu":
            storage = t.untyped_storage()
            self._held[_storage_address(storage)] = storage

    def name(self, name: str, t: Tensor) -> None:
        """Give a tensor's memory the name of an argument or of a result."""
        self.note(t)
        self._names.setdefault(_storage_address(t.untyped_storage()), name)

    def found(self, word: int) -> int | str:
        """Tensor and offset of an address; every other number is itself."""
        i = bisect.bisect_right(self._bases, word) - 1
        if i < 0 or word - self._bases[i] > self._held[self._bases[i]].nbytes():
            return word
        at = self._bases[i]
        if at not in self._names:  # the contents tell copies of other tensors apart
            size = self._held[at].nbytes()
            digest = _digest(ctypes.string_at(at, min(size, 4096)))
            self._names[at] = f"memory {len(self._names)} of {size}, {digest}"
        return f"{self._names[at]} + {word - at}"

    @functools.cached_property
    def _bases(self) -> list[int]:
        return sorted(self._held.keys() - {0})


_storage_address = torch.UntypedStorage.data_ptr


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class Driver:
    """Notes what the backend asks of CUDA; a kernel's handle is its source, entry and macros."""

    def __init__(self) -> None:
        self.noted: list[tuple] = []
        self.tensors = Tensors()

    def cuLaunchKernelEx(self, config, function, pointers, extra) -> int:
        given, (source, entry, macros) = config._obj, function
        fields = [tuple(given.grid), tuple(given.block), given.shared, given.stream, given.count]
        if given.count:
            fields.append(ctypes.string_at(given.attributes, 72 * given.count))
        sizes = parameter_sizes(source, entry)
        where = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p * len(sizes))).contents
        params = [ctypes.string_at(at, size) for at, size in zip(where, sizes)]
        self.noted.append((f"{source} {entry}", macros, fields, params))
        return 0

    def cuMemsetD32Async(self, where, value, count, stream) -> int:
        self.noted.append(("memset", (value, count, stream), [], [where.to_bytes(8, "little")]))
        return 0

    def cuTensorMapEncodeTiled(self, out, dtype, rank, where, *rest) -> int:
        """A map is its tensor's address, followed by a digest of the other arguments."""
        sizes = 8 * rank, 8 * (rank - 1), 4 * rank, 4 * rank
        given = [x[:n] for x, n in zip(rest, sizes)]
        assert list(map(len, given)) == list(sizes)
        text = _digest(repr((dtype, rank, given, rest[4:])).encode()).encode()
        ctypes.memmove(out, (where.value.to_bytes(8, "little") + text).ljust(128, b"\0"), 128)
        return 0

    def taken(self, results: dict[str, Tensor]) -> list[tuple]:
        """What was noted, with addresses as tensors and offsets."""
        for name, t in results.items():
            self.tensors.name(name, t)
        found = [
            (name, macros, fields, [_words(one, self.tensors) for one in params])
            for name, macros, fields, params in self.noted
        ]
        self.noted, self.tensors = [], Tensors()
        return found


def _words(data: bytes, tensors: Tensors) -> list:
    whole = len(data) // 8 * 8
    words = memoryview(data[:whole]).cast("Q")
    return [tensors.found(word) for word in words] + [data[whole:]] * (whole < len(data))


@functools.cache
def parameter_sizes(source: str, entry: str) -> tuple[int, ...]:
    """Bytes of each parameter of a kernel, as its source declares them."""
    files = sorted(structs.SOURCES.glob("*.cu"), key=lambda path: path.stem != source)
    declared = re.compile(rf"\b{entry}\(([^()]*(?:__grid_constant__|\*)[^()]*)\)\s*\{{")
    found = next(filter(None, (declared.search(path.read_text()) for path in files)))
    text = re.sub(r"\bconst |__grid_constant__ |^#.*$", "", found[1], flags=re.M)
    layout = structs.ParamsLayout(" ".join(text.split()).replace(",", ";"))
    return tuple(field.size for field in layout.fields.values())


def replace_driver() -> Driver:
    """Let the backend run on CPU tensors of this process."""
    driver = Driver()
    launch.driver = lambda: driver
    launch._load = lambda name, entry: launch.Kernel(name, entry.threads, entry.shared)
    nvrtc.program = lambda source, entry, macros: (source, entry, tuple(sorted(macros.items())))
    nvrtc.begin = lambda programs: [lambda one=one: one for one in programs]
    instead = {
        "current_device": lambda: None,  # the index of CPU tensors
        "current_stream": lambda index: 77,
        "empty": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
    }
    for module in modules():
        for name in instead.keys() & vars(module).keys():
            setattr(module, name, instead[name])
    for place, names in (
        (torch, ("empty", "empty_like", "empty_strided")),
        (Tensor, ("new_empty",)),
    ):
        for name in names:
            setattr(place, name, _zeroed(getattr(place, name)))
    torch.randn = functools.partial(_different, itertools.count(1))
    address = torch.Tensor.data_ptr
    torch.Tensor.data_ptr = lambda t: driver.tensors.note(t) or address(t)
    for function in filter(inspect.isfunction, vars(hopper).values()):  # their checks are for CUDA
        code = function.__code__
        names = tuple("cpu" if one == "cuda" else one for one in code.co_consts)
        function.__code__ = code.replace(co_consts=names)
    dispatch.AUTO, dispatch._available = {"cpu": ("hopper",)}, {"hopper": None}
    planning._check_of_values = lambda call: None
    varlen_quantized._may_run = lambda *call: True
    return driver


def _different(numbers: Iterator[int], *shape, generator=None, dtype=torch.float32) -> Tensor:
    """In place of random numbers, which take most of the time."""
    shape = shape if isinstance(shape[0], int) else shape[0]
    return torch.full(tuple(shape), next(numbers) % 251, dtype=dtype)


def _zeroed(function: Callable) -> Callable:
    def made(*args, **options) -> Tensor:
        with torch.no_grad():
            return function(*args, **options).zero_()

    return made


def modules() -> list:
    """The modules of the backend."""
    names = [
        f"{package.__name__}.{one.name}"
        for package in (hopper, runtime)
        for one in pkgutil.iter_modules(package.__path__)
        if one.name != "warm"
    ]
    return [importlib.import_module(name) for name in names]


def forget() -> None:
    """Drop what was remembered of a device."""
    planning.forget()
    for module in modules():
        for one in vars(module).values():
            if hasattr(one, "cache_clear") and module is not structs:
                one.cache_clear()


# The calls. A maker returns a function that makes new tensors, names them and calls.


def dense_or_packed(case: Case | PackedCase) -> Callable[[Tensors], Iterator]:
    """Forward alone, then forward and backward, with and without LSE."""
    packing = case.packing() if isinstance(case, PackedCase) else ()
    function = fa_ops.attention_varlen if packing else fa_ops.attention

    def run(tensors: Tensors) -> Iterator[dict[str, Tensor]]:
        for grads in (False, True):
            call = case.fresh(requires_grad=grads)
            (q, k, v), options = call[:3], _public(call)
            torch.manual_seed(0)  # of dropout
            named = {"query": q, "key": k, "value": v} | options
            named |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), packing))
            _name(tensors, named)
            out, lse = function(q, k, v, *packing, return_lse=True, **options)
            yield {"out": out, "lse": lse}
            _name(tensors, named)
            if not grads:
                out = function(q, k, v, *packing, **options)
                yield {"out": out}
                continue
            features = getattr(case, "features", case)
            grad_out, grad_lse = case.grad_outputs(out.detach(), lse.detach())
            _name(tensors, {"out": out, "lse": lse, "grad_out": grad_out, "grad_lse": grad_lse})
            leaves = {n: t for n, t in named.items() if torch.is_tensor(t) and t.requires_grad}
            losses = ([out, lse], [grad_out, grad_lse]) if features.lse_grad else (out, grad_out)
            found = torch.autograd.grad(*losses[:1], list(leaves.values()), losses[1])
            yield {f"gradient of {name}": t for name, t in zip(leaves, found)}

    return run


def _public(call: Call) -> dict:
    """The keyword arguments of the public functions."""
    o, names = call.options, ["alibi_slopes", "sinks", "kv_lens"]
    names += [] if call.is_packed else ["attn_mask", "key_ranges", "mask_blocks"]
    scalars = ("dropout_p", "is_causal", "scale", "softcap", "deterministic")
    given = {name: getattr(call.operands, name) for name in names}
    given |= {name: getattr(o, name) for name in scalars}
    return given | {"window": (o.window_left, o.window_right)}


def _name(tensors: Tensors, named: dict) -> None:
    for name, t in named.items():
        if torch.is_tensor(t):
            tensors.name(name, t)


def over_cache(case: CacheCase) -> Callable[[Tensors], Iterator]:
    """A call over a cache, and once more."""

    def run(tensors: Tensors) -> Iterator[dict[str, Tensor]]:
        for _ in range(2):
            call = case.fresh()
            _name(tensors, call._asdict() | call.operands._asdict())
            out, lse = by_operator(call)
            yield {"out": out, "lse": lse}

    return run


def eight_bit(case: quantized.QuantizedCase) -> Callable[[Tensors], Iterator]:
    """A call with 8-bit products, dense or packed, and once more."""

    def run(tensors: Tensors) -> Iterator[dict[str, Tensor]]:
        for _ in range(2):
            call = case.fresh()
            _name(tensors, call._asdict() | call.operands._asdict())
            if case.page is None:
                out, lse = by_operator(call)
                yield {"out": out, "lse": lse}
            else:
                quantized.packed_call(call, case.page, case.case.seed)
                yield {}

    return run


def over_pages(case: CacheCase, causal: bool) -> Callable[[Tensors], Iterator]:
    """Packed queries over pages."""

    def run(tensors: Tensors) -> Iterator[dict[str, Tensor]]:
        for with_lse in (True, False):
            call = case.fresh()
            (q, k, v), t = call[:3], call.operands
            query = q.transpose(1, 2).flatten(0, 1).contiguous()
            ends = torch.arange(case.B + 1, dtype=torch.int32) * case.Sq
            named = {"query": query, "key": k, "value": v, "ends": ends, "table": t.page_table}
            _name(tensors, named | t._asdict())
            found = fa_ops.attention_varlen(
                query, k, v, ends, None, page_table=t.page_table, kv_lens=t.kv_lens,
                is_causal=causal, window=case.window, softcap=case.softcap, sinks=t.sinks,
                alibi_slopes=t.alibi_slopes, return_lse=with_lse,
            )  # fmt: skip
            yield dict(zip(("out", "lse"), found)) if with_lse else {"out": found}

    return run


def growing(case: CacheCase) -> Callable[[Tensors], Iterator]:
    """A cache with more and more keys, whose tensors are slices and then of their own."""

    def run(tensors: Tensors) -> Iterator[dict[str, Tensor]]:
        q, k, v = case.fresh()[:3]
        for keys, copied in ((600, False), (601, True), (640, True), (700, False), (602, True)):
            parts = [t[:, :, :keys] for t in (k, v)]
            parts = [t.contiguous() for t in parts] if copied else parts
            _name(tensors, {"query": q, "key": parts[0], "value": parts[1]})
            yield {"out": fa_ops.attention(q, *parts, is_causal=case.is_causal)}
            lens = torch.full((case.B,), keys, dtype=torch.int32)
            _name(tensors, {"query": q, "key": parts[0], "value": parts[1], "lens": lens})
            yield {"out": fa_ops.attention_with_kv_cache(q, *parts, lens)}

    return run


def misaligned(function: Callable, shapes: tuple, arguments: tuple = (), **options):
    """A call of tensors that TMA can read, then of others with the same geometry."""

    def run(tensors: Tensors) -> Iterator[dict[str, Tensor]]:
        for wrong in (None, None, 0, 1, 2, None):
            made = [
                torch.zeros(torch.Size(shape).numel() + 8, dtype=torch.bfloat16)[
                    8 * (i != wrong) or 1 :
                ][: torch.Size(shape).numel()].view(shape)
                for i, shape in enumerate(shapes)
            ]
            made = [t.requires_grad_(function is not fa_ops.attention_with_kv_cache) for t in made]
            named = dict(zip(("query", "key", "value"), made))
            _name(tensors, named)
            out = function(*made, *arguments, **options)
            yield {"out": out}
            if out.requires_grad:
                _name(tensors, named | {"out": out})
                found = torch.autograd.grad(out, made, torch.zeros_like(out))
                yield dict(zip(("dq", "dk", "dv"), found))

    return run


def named_calls() -> Iterator[tuple[str, Callable]]:
    """Calls of every path whose sizes random calls do not have."""
    half = {"dtype": torch.bfloat16, "D": 64, "Dv": 64}
    for D, Dv in ((64, 64), (128, 128), (128, 64), (96, 96), (192, 128), (256, 256), (512, 512)):
        for causal in (False, True):
            sizes = {"B": 2, "Hq": 8, "Hkv": 2, "Sq": 300, "Sk": 700, "D": D, "Dv": Dv}
            case = Case(**sizes, dtype=torch.bfloat16, is_causal=causal)
            yield f"dense D{D}/{Dv} causal {causal}", dense_or_packed(case)
            for B, H, S in ((40, 4, 49), (70, 2, 130), (1, 2, 1500)):
                sizes = {"B": B, "Hq": H, "Hkv": H, "Sq": S, "Sk": S, "D": D, "Dv": Dv}
                case = Case(**sizes, dtype=torch.float16, is_causal=causal)
                yield f"dense B{B} S{S} D{D}/{Dv} causal {causal}", dense_or_packed(case)
            case = Case(dtype=torch.bfloat16, D=D, Dv=Dv, Hq=8, Hkv=2, is_causal=causal)
            case = PackedCase((130, 300, 1), (200, 300, 64), 0, case)
            yield f"packed D{D}/{Dv} causal {causal}", dense_or_packed(case)
    for mask in ("bool", "float"):
        for shape in ((1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 0, 1), (0, 0, 1, 0)):
            for grad in (False, True)[: 1 + (mask == "float")]:
                for blocks, slow in ((False, False), (True, False), (True, True)):
                    case = Case(
                        **half, B=2, Hq=4, Hkv=2, Sq=300, Sk=420, mask=mask, mask_shape=shape,
                        mask_grad=grad, mask_blocks=blocks, deterministic=slow,
                        dropout_p=0.3 * slow,
                    )  # fmt: skip
                    label = f"mask {mask} {shape} gradient {grad} blocks {blocks} {slow}"
                    yield label, dense_or_packed(case)
    for Sq, page in ((1, 0), (4, 64), (1, 16), (2, 1), (1, 5), (64, 64), (130, 0), (40, 16)):
        for extra in ({}, {"new": 1}, {"new": 1, "rotary": 16}, {"fp8": True}):
            for D, Hq in ((64, 8), (128, 32)):
                case = CacheCase(
                    B=3, Hq=Hq, Hkv=8, Sq=Sq, S=900, page_size=page, dtype=torch.bfloat16, D=D,
                    Dv=D, is_causal=True, bshd=False, **extra,
                )  # fmt: skip
                yield f"cache Sq{Sq} page{page} D{D} {extra}", over_cache(case)
    for Sq, page, extra in itertools.product(
        (20, 70), (0, 16, 64), ({}, {"sinks": True}, {"new": 3})
    ):
        sizes = {"B": 1, "Hq": 8, "Hkv": 2, "Sq": Sq, "S": 9000, "D": 64, "Dv": 64}
        case = CacheCase(**sizes, dtype=torch.bfloat16, page_size=page, is_causal=True, **extra)
        yield f"prompt Sq{Sq} page{page} {extra}", over_cache(case)
    case = CacheCase(B=2, Hq=64, Hkv=8, Sq=70, S=900, D=64, Dv=64, dtype=torch.bfloat16, fp8=True)
    for page in (0, 64):
        yield f"prompt e4m3 page{page}", over_cache(dataclasses.replace(case, page_size=page))
    for Hq, page in ((16, 0), (128, 64), (40, 1), (64, 16)):
        for Sq, new in ((1, 0), (2, 0), (1, 1)):
            case = CacheCase(
                B=2, Hq=Hq, Hkv=1, Sq=Sq, S=700, D=576, Dv=512, shared=True, page_size=page,
                dtype=torch.float16, is_causal=True, new=new,
            )  # fmt: skip
            yield f"latent Hq{Hq} page{page} Sq{Sq} new{new}", over_cache(case)
    for page, Sq in ((16, 1), (64, 33), (64, 140), (32, 7)):
        for extra in (
            {},
            {"window": (99, 0)},
            {"softcap": 3.0},
            {"sinks": True},
            {"alibi": "heads"},
        ):
            case = CacheCase(
                B=3, Hq=8, Hkv=2, Sq=Sq, S=500, page_size=page, dtype=torch.bfloat16, D=128,
                Dv=128, **extra,
            )  # fmt: skip
            yield f"pages {page} Sq{Sq} {extra}", over_pages(case, Sq > 1)
    for Hq, D in ((4, 64), (16, 128)):
        case = CacheCase(B=2, Hq=Hq, Hkv=2, S=800, dtype=torch.bfloat16, D=D, Dv=D, bshd=False)
        yield f"growing Hq{Hq} D{D}", growing(case)
    shapes = ((2, 4, 200, 64),) * 3
    yield "misaligned dense", misaligned(fa_ops.attention, shapes, is_causal=True)
    ends = torch.tensor([0, 90, 200], dtype=torch.int32)
    packed = ((200, 4, 64),) * 3
    yield "misaligned packed", misaligned(fa_ops.attention_varlen, packed, (ends, ends))
    lens = torch.tensor([700, 600], dtype=torch.int32)
    shapes = (2, 4, 1, 64), (2, 2, 700, 64), (2, 2, 700, 64)
    yield "misaligned cache", misaligned(fa_ops.attention_with_kv_cache, shapes, (lens,))
    shapes = (2, 4, 90, 64), (2, 2, 700, 64), (2, 2, 700, 64)
    yield "misaligned prompt", misaligned(fa_ops.attention_with_kv_cache, shapes, (lens,))


def random_calls_of(count: int) -> Iterator[tuple[str, Callable]]:
    """Random calls of every kind."""
    for seed in range(count):
        pick, kind = random.Random(seed).choice, random_calls.KINDS[seed % 4]
        family = random_calls.family(pick, kind, DTYPES)
        case = family.case(pick)
        if kind == "quantized":
            yield f"{seed}: {case}", eight_bit(case)
        elif kind == "cached":
            yield f"{seed}: {case}", over_cache(_supported(case, pick))
        else:
            yield f"{seed}: {case}", dense_or_packed(case)


def _supported(case: CacheCase, pick: random_calls.Pick) -> CacheCase:
    """The case without most options that the backend refuses; every third is a prompt."""
    keep = pick(range(8)) == 0
    options = {} if keep else {"num_splits": 0, "batch_invariant": False, "unified_max": None}
    if not keep and case.D > 256:
        options |= {"D": 128, "Dv": 128}
    if pick(range(3)) == 0:
        options |= {
            "Sq": pick((17, 64, 65, 100)),
            "Hq": case.Hkv * pick((1, 8, 12)),
            "ranges": False,
        }
    if (case.scale or 1.0) < 0 and not keep:
        options["scale"] = None
    return dataclasses.replace(case, **options)


def record(count: int, path: Path) -> None:
    """Write what each call launches."""
    driver, found = replace_driver(), {}
    for processors in PROCESSORS:
        properties = SimpleNamespace(multi_processor_count=processors)
        torch.cuda.get_device_properties = lambda index, found=properties: found
        forget()
        calls = [*named_calls(), *random_calls_of(count)]
        for i, (name, call) in enumerate(calls):
            with use_backend("hopper" if i % 3 else "auto"):
                found[f"{processors} processors, {name}"] = _steps(driver, call)
    path.write_bytes(pickle.dumps(found))


def _steps(driver: Driver, call: Callable[[Tensors], Iterator]) -> list:
    """Launches and results of each step of a call, the last of which may be an error."""
    steps = []
    driver.taken({})
    try:
        # the tensors of one step are those of the driver meanwhile
        run = call(_Current(driver))
        for results in run:
            results = {name: t for name, t in results.items() if t is not None}
            layouts = [
                (name, t.dtype, tuple(t.shape), t.stride(), _digest(_bytes(t)))
                for name, t in results.items()
            ]
            steps.append((driver.taken(results), layouts))
    except Exception as error:
        steps.append((driver.taken({}), [type(error).__name__, str(error)]))
    return steps


class _Current:
    """The tensors of the step that a driver takes notes of."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def name(self, name: str, t: Tensor) -> None:
        self._driver.tensors.name(name, t)


def _bytes(t: Tensor) -> bytes:
    flat = t.detach().flatten()[:4096].contiguous()
    return flat.view(torch.uint8).numpy().tobytes() if t.numel() else b""


def recorded(checkout: Path, count: int) -> dict[str, list]:
    """What each call launches in a checkout, by the calls of this file."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launches"
        command = [sys.executable, Path(__file__).resolve(), ".", ".", "--random", str(count)]
        command += ["--record", path]
        if subprocess.run(command, cwd=checkout, env=environment).returncode:
            raise SystemExit(f"the calls of {checkout} failed, see above")
        return pickle.loads(path.read_bytes())


def difference(old: list, new: list) -> str | None:
    """Where two calls differ first; None if they do not."""
    if old == new:
        return None
    return _first_difference(old, new, "step")


def _first_difference(old: object, new: object, where: str) -> str:
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        for i, (a, b) in enumerate(zip(old, new)):
            if a != b:
                return _first_difference(a, b, f"{where}[{i}]")
        return f"{where}: {len(old)} and {len(new)} elements"
    return f"{where}: {old!r} and {new!r}"


def main(
    old: Annotated[Path, typer.Argument(help="a checkout")],
    new: Annotated[Path, typer.Argument(help="another")],
    random: Annotated[int, typer.Option(help="random calls")] = 2000,
    record_to: Annotated[Path | None, typer.Option("--record", hidden=True)] = None,
) -> None:
    """Compare every launch of the Hopper backend in two checkouts."""
    if record_to is not None:
        record(random, record_to)
        return
    before, after = (recorded(checkout.resolve(), random) for checkout in (old, new))
    both = [name for name in before if name in after]
    differing = {name: difference(before[name], after[name]) for name in both}
    differing = {name: text for name, text in differing.items() if text is not None}
    for name, text in differing.items():
        print(f"{name}\n    {text}")
    launches = [sum(len(noted) for noted, _ in before[name]) for name in both]
    missing = len(before.keys() ^ after.keys())
    print(
        f"{len(both)} calls, of which {sum(n > 0 for n in launches)} launch {sum(launches)} times: "
        f"{len(differing)} differing; {missing} on one side alone"
    )
    raise typer.Exit(int(bool(differing or missing)))


if __name__ == "__main__":
    typer.run(main)
