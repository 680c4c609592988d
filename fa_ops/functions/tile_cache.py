"""Runs of tiles that calls of flex_attention visit: made once they pay, kept while they are right.

On a GPU a kernel finds them in each call that takes longer than that: in less time than to learn
whether those of an earlier call are still right, and without waiting.

Elsewhere a mask is analysed on the host in time that grows with its tiles. A call that takes
much longer is preceded by the analysis; others add up what they take without runs, and the one by
which that exceeds the analysis makes them. So no mask costs more than about twice what it must,
whether it serves one call or all layers of a model.

Runs are kept by the mask's expressions, the sizes and the captured tensors: these are held weakly,
and their version counters and addresses are compared. What no counter tells of, such as a write
through NumPy, is found by comparing the terms that the mask reads: on the host before the call, on
a GPU in it, where runs of other terms are replaced by one run of all tiles, without waiting.

While a graph is traced, values are not known. A graph for a GPU holds an operator that makes the
runs there, one for all layers of the same mask. The CPU backend finds the tiles of a call that
comes without runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops import tracing
from fa_ops.ops.programmed import PROGRAM_TILES
from fa_ops.plans import dispatch
from fa_ops.programs import tiles
from fa_ops.programs.expressions import FLOAT, INT, Node, order
from fa_ops.programs.program import (
    MAX_RUNS,
    TILE_SIZE,
    ScoreProgram,
    constants_of,
    parse,
)
from fa_ops.programs.splitting import Split

_MOST_KEPT = 32  # masks
_MOST_TILES = 2**20  # of all batches and heads: hosts of kernels look at each of them
_MOST_LINES = 2**15  # rows and columns of tiles likewise, of 132 bytes
# Seconds, on a GPU of the H200 in bfloat16: of the wait for terms; of the analysis there, by
# operations of torch; and by the kernel, and of its tiles
_OF_WAITING, _OF_DEVICE = 1e-4, 3e-4
_OF_KERNEL, _OF_TILE = 4e-5, 5e-11
_RATE = 5e14  # floating-point operations a second
FIND_TILES = ("cpu",)  # devices whose backend finds tiles where it is given none
_UNKNOWN = 4096  # queries, or keys, where a graph is for any number


class TensorStates:
    """Tensors as they were: alive, with equal version counters and addresses."""

    def __init__(
        self, tensors: Sequence[Tensor], when_gone: Callable[[object], None] | None = None
    ) -> None:
        self.tensors = [weakref.ref(t, when_gone) for t in tensors]
        self.settings = [_settings(t) for t in tensors]

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, and nothing tells that they were written to."""
        return len(tensors) == len(self.tensors) and all(
            ref() is t and settings == _settings(t)
            for ref, settings, t in zip(self.tensors, self.settings, tensors)
        )


def _settings(t: Tensor) -> tuple:
    version = 0 if t.is_inference() else t._version  # such tensors have no counter
    return version, t.data_ptr(), tuple(t.shape), t.stride()


class _Mask(NamedTuple):
    """What the mask of a split reads."""

    structure: tuple  # equal for equal masks of equal terms
    terms: tuple[int, ...]  # by their numbers in the program
    tensors: tuple[int, ...]  # by the numbers by which expressions read them
    by_batch: bool
    by_head: bool


@functools.lru_cache(256)
def _mask_of(split: Split) -> _Mask:
    program = split.program
    nodes = order(program.mask)
    terms = tuple(sorted({n.value for n in nodes if n.op == "term"}))
    defined = [split.terms[i] for i in terms]
    tensors = tuple(sorted({n.value for n in order(*defined) if n.op == "load"}))
    structure = _structure(program.mask, *defined), tuple(program.terms[i] for i in terms), tensors
    return _Mask(structure, terms, tensors, *tiles.differs(program))


def _structure(*roots: Node) -> tuple:
    """Expressions as a tuple that is equal for equal ones."""
    places: dict[Node, int] = {}
    for node in order(*roots):
        places[node] = len(places)
    nodes = ((n.op, n.type, n.value, *(places[a] for a in n.args)) for n in places)
    return (*nodes, *(places[root] for root in roots))


class MaskedCall(NamedTuple):
    """A call whose program has a mask, as far as its tiles depend on it."""

    split: Split
    captured: Sequence[Tensor]  # by the number by which expressions read them
    term_values: Tensor | None
    term_indices: Tensor | None
    sizes: tuple[int, int, int, int]  # (B, Hq, Sq, Sk)
    features: int  # of a query and of a value together
    keys: int  # that a query may attend by the window
    has_backward: bool
    device: torch.device

    @property
    def read(self) -> list[Tensor]:
        """The captured tensors that the mask reads."""
        return [self.captured[i] for i in _mask_of(self.split).tensors]

    def views(self) -> list[Tensor]:
        """The terms of the mask, as integers of their bits."""
        views = self.split.program.views(self.term_values, self.term_indices, *self.sizes)
        return [views[i].detach().view(torch.int32) for i in _mask_of(self.split).terms]

    @property
    def key(self) -> tuple:
        """What the tiles depend on besides the values of captured tensors."""
        dtype = None if self.term_values is None else self.term_values.dtype
        read = tuple(map(id, self.read))
        return _mask_of(self.split).structure, read, self.sizes, dtype, self.device

    @property
    def heads(self) -> int:
        """How many times the mask is analysed."""
        mask, (B, H) = _mask_of(self.split), map(hint, self.sizes[:2])
        return (B if mask.by_batch else 1) * (H if mask.by_head else 1)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return tuple(-(-hint(size) // TILE_SIZE) for size in self.sizes[2:])

    def seconds_of_analysis(self) -> float:
        """An estimate of the time in which the runs are made."""
        waiting = 0.0 if self.device.type == "cpu" else _OF_WAITING
        return waiting + tiles.seconds_of_analysis(self.split.program, self.sizes)

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel of the device finds the tiles."""
        return dispatch.tile_finder(self.device, tuple(map(hint, self.sizes))) is not None

    def seconds_on_device(self) -> float:
        """The same where they are made on the device, without waiting for it."""
        m, n = self.grid
        return _OF_KERNEL + _OF_TILE * self.heads * m * n if self.has_kernel else _OF_DEVICE

    def seconds_that_tiles_save(self) -> float:
        """An estimate of what the call, and its backward pass, may take less with runs."""
        B, H, Sq, _ = map(hint, self.sizes)
        pairs = float(B * H * Sq * self.keys)
        if self.device.type == "cpu":
            forward = tiles.seconds_on_cpu(pairs, self.features)
        else:
            forward = 2.0 * pairs * self.features / _RATE
        return tiles.SAVED * forward * (1.0 + tiles.OF_BACKWARD * self.has_backward)

    def refusal(self) -> str | None:
        """Why its tiles are not made, whatever they would save; or None."""
        packed = self.term_values, self.term_indices
        given = *self.read, *(t for t in packed if t is not None)
        is_known = tracing.can_read(*given, waiting=True) and not (
            tracing.in_functorch() or tracing.is_capturing(self.device)
        )
        if not is_known or self.device.type == "meta":
            return "what the mask reads is not known while this is traced, mapped or captured"
        return self.refusal_of_sizes()

    def refusal_of_sizes(self) -> str | None:
        """Why they are not made of such lengths, whether values are known or not."""
        m, n = self.grid
        if m * n <= 1 or not self.features:
            return "there is nothing to skip"
        if self.heads * m * n > _MOST_TILES or self.heads * (m + n) > _MOST_LINES:
            return f"there are {self.heads * m * n}, too many for a call: pass fa_ops.mask_tiles"
        return None


def hint(n: int | torch.SymInt) -> int:
    """A size; of one that varies in a graph, that for which it was traced, without a guard."""
    if type(n) is int:
        return n
    return n.node.hint if n.node.has_hint() else _UNKNOWN


def traced_runs_of(call: MaskedCall) -> Tensor | None:
    """The runs of a call's tiles by an operator in the graph, where that pays; or None."""
    if call.device.type in FIND_TILES or tracing.in_functorch() or call.refusal_of_sizes():
        return None
    if call.seconds_that_tiles_save() < call.seconds_on_device():
        return None
    mask, program = _mask_of(call.split), call.split.program
    values, indices = call.term_values, call.term_indices
    if program.score is not None:  # whose terms differ between layers
        views = program.views(values, indices, *call.sizes)
        kept = [views[i].detach() for i in mask.terms]
        program = _mask_alone(program, mask.terms)
        values, indices = (
            program.pack(t, kept, call.sizes, kept[0]) if kept else None for t in (FLOAT, INT)
        )
    return _by_operator(str(program), values, indices, call.sizes, call.device)


def _by_operator(
    text: str, values: Tensor | None, indices: Tensor | None, sizes: tuple, device: torch.device
) -> Tensor:
    values = values if values is None else values.detach()
    like = values if values is not None else indices
    if like is None:
        like = torch.zeros((), device=device)
    return PROGRAM_TILES(like, text, *sizes, values, indices)


_MOST_NUMBERS = 8  # with which programs that are otherwise equal are compiled
_compiled: dict[str, set[str]] = {}  # programs by their text without numbers


def _is_compiled(text: str) -> bool:
    if len(_compiled) >= 1024:
        _compiled.clear()
    known = _compiled.setdefault(constants_of(text)[0], set())
    if len(known) < _MOST_NUMBERS:
        known.add(text)
    return text in known


def runs_of_program(
    text: str, values: Tensor | None, indices: Tensor | None, sizes: tuple, device: torch.device
) -> Tensor:
    """The runs of a program's mask, whatever they cost: by a kernel on a GPU, else on the CPU.

    Also there for a program that has been compiled with other numbers often.
    """
    has_kernel = min(sizes) > 0 and dispatch.tile_finder(device, sizes) is not None
    if has_kernel and _is_compiled(text):
        return _by_operator(text, values, indices, sizes, device)
    program = parse(text)
    return tiles.tile_runs(program, program.views(values, indices, *sizes), sizes)


def _mask_alone(program: ScoreProgram, terms: tuple[int, ...]) -> ScoreProgram:
    """The mask of a program, and these terms, which are those that it reads."""
    e, types = program.expressions, program.terms
    new = {e.term(n, types[n].type): e.term(i, types[n].type) for i, n in enumerate(terms)}
    kept = tuple(types[n]._replace(grad=False) for n in terms)
    return ScoreProgram(kept, e.replaced(program.mask, new), None, e)


class _MaskTiles:
    """What is known of the tiles of a mask."""

    def __init__(self, call: MaskedCall, key: tuple) -> None:
        self.states = TensorStates(call.read, lambda _: _kept.pop(key, None))
        self.saved = 0.0  # seconds that runs would have saved so far
        self.is_made = False
        self.terms: list[Tensor] = []  # of which the runs are
        self.runs: Tensor | None = None  # None as well where no tile is empty or full
        self.everything: Tensor | None = None

    def make(self, call: MaskedCall) -> None:
        """Analyse the mask."""
        self.is_made = True
        with torch.inference_mode(False), torch.no_grad():
            self.terms = [x.clone() for x in call.views()]
            program = call.split.program
            packed = (t if t is None else t.cpu() for t in (call.term_values, call.term_indices))
            runs = tiles.tile_runs(program, program.views(*packed, *call.sizes), call.sizes)
            everything = _everything(*runs.shape[:2], *call.grid)
            if not torch.equal(runs, everything):
                self.runs, self.everything = (x.to(call.device) for x in (runs, everything))

    def runs_for(self, call: MaskedCall) -> Tensor | None:
        """The runs, if they are of the call's terms; on GPUs one run of all tiles if not."""
        equal = [(a == b).all() for a, b in zip(call.views(), self.terms, strict=True)]
        if not equal:
            return self.runs
        same = torch.stack(equal).all()
        if same.is_cpu:
            return self.runs if same else None
        return torch.where(same, self.runs, self.everything)


def _everything(B: int, H: int, m: int, n: int) -> Tensor:
    """Runs of a mask of which nothing is known."""
    runs = torch.zeros((B, H, m + n, 1 + 2 * MAX_RUNS), dtype=torch.int32)
    runs[..., 0] = 1
    runs[:, :, :m, 2], runs[:, :, m:, 2] = 2 * n + 1, 2 * m + 1
    return runs


_kept: dict[tuple, _MaskTiles] = {}


def runs_of(call: MaskedCall) -> Tensor | None:
    """The runs of a call's tiles, made if that pays now; None: all tiles are visited."""
    if call.has_kernel:
        return _runs_by_kernel(call)
    if call.refusal() is not None:
        return None
    key = call.key
    kept, runs = _kept.pop(key, None), None
    if kept is not None and not kept.states.hold(call.read):
        kept = None
    if kept is not None and kept.runs is not None:
        runs = kept.runs_for(call)
        kept = kept if runs is not None else None
    if kept is None:
        kept = _MaskTiles(call, key)
    while len(_kept) >= _MOST_KEPT:
        _kept.pop(next(iter(_kept)), None)
    _kept[key] = kept  # behind all others: the first is dropped
    if not kept.is_made:
        kept.saved += call.seconds_that_tiles_save()
        if kept.saved >= call.seconds_of_analysis():
            kept.make(call)
            runs = kept.runs
    return runs


def _runs_by_kernel(call: MaskedCall) -> Tensor | None:
    """Those of this call: to find them takes less time than to compare terms with earlier ones."""
    if tracing.in_functorch() or call.refusal_of_sizes() is not None:
        return None
    if call.seconds_that_tiles_save() < call.seconds_on_device():
        return None
    text = _text_of(call.split)
    return _by_operator(text, call.term_values, call.term_indices, call.sizes, call.device)


@functools.lru_cache(256)
def _text_of(split: Split) -> str:
    return str(split.program)


def explanation(call: MaskedCall) -> str:
    """What `explain` says of the tiles of a call that gives none."""
    if call.has_kernel and not tracing.in_functorch():
        reason = call.refusal_of_sizes()
        if reason is None and call.seconds_that_tiles_save() < call.seconds_on_device():
            reason = "to find empty ones takes longer than the call may take less"
        if reason is None:
            return "empty tiles are skipped: they are found in each call, on the GPU"
        return f"all tiles are visited: {reason}"
    reason = call.refusal()
    if reason is not None:
        return f"all tiles are visited: {reason}"
    kept = _kept.get(call.key)
    if kept is not None and kept.is_made and kept.states.hold(call.read):
        if kept.runs is None:
            return "all tiles are visited: the mask decides in each"
        return "empty tiles are skipped: they are known from an earlier call"
    once, cost = call.seconds_that_tiles_save(), call.seconds_of_analysis()
    if once >= cost:
        return "empty tiles are skipped: they are found in the call"
    calls = cost / max(once, 1e-9)
    return f"all tiles are visited: empty ones are found when about {calls:.0f} calls are made"
