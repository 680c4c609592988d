"""What each figure shows: a function for each, from the JSON files of the benchmarks."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tests.evaluation.plots import diagrams
from tests.evaluation.plots.axes import Comparison, Panel, bars, curves, legend
from tests.evaluation.plots.svg import Drawing

WIDTH = 600
# What the benchmarks call the implementations, what figures call them, and their series.
NAMES = {
    "fa_ops hopper": ("fa_ops", 0),
    "fa_ops": ("fa_ops", 0),
    "sdpa cudnn": ("cuDNN (SDPA)", 1),
    "sdpa": ("SDPA", 1),
    "flash-attn 3": ("FlashAttention 3", 2),
    "flash-attn 4": ("FlashAttention 4", 3),
    "eager": ("written by hand", 4),
}
SERIES = dict(NAMES.values())
Values = dict[str, dict[int, float]]  # by the name in figures, then by length


class Results:
    """The JSON files of a folder: `records(name)` and the `source` of each file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, name: str) -> dict:
        return json.loads((self.folder / f"{name}.json").read_text())

    def records(self, name: str) -> list[dict]:
        """The measurements."""
        return self._file(name)["records"]

    def source(self, name: str) -> str:
        """The device, the version of torch, the date and the command of a file."""
        facts = self._file(name)["environment"]
        return f"{facts['device']}, torch {facts['torch']}, {facts['date']}: {facts['command']}"

    def device(self, *names: str) -> str:
        """The devices of the files in words."""
        devices = dict.fromkeys(self._file(name)["environment"]["device"] for name in names)
        return " and ".join(devices)


def _by_length(rows: list[tuple[str, int, float]]) -> Values:
    values: Values = defaultdict(dict)
    for implementation, length, number in rows:
        values[NAMES[implementation][0]][length] = number
    return dict(values)


def _headed(title: str, source: str, names: set[str]) -> tuple[Drawing, float]:
    """A drawing with its title and legend, and the y below them."""
    drawing = Drawing(WIDTH, title, source)
    drawing.text(16, 30, title, "title")
    legend(drawing, 20, 54, {name: n for name, n in SERIES.items() if name in names})
    return drawing, 76


def _sweep(results: Results, name: str, title: str) -> Drawing:
    """TFLOP/s by length: a panel for each head dimension and mask."""
    records = results.records(name)
    names = {NAMES[r["implementation"]][0] for r in records}
    title = f"{title}, {results.device(name)}"
    drawing, y = _headed(title, results.source(name), names)
    top = max(r["tflops"] for r in records)
    for D in sorted({r["D"] for r in records}):
        for column, causal in enumerate((False, True)):
            rows = [r for r in records if (r["D"], r["causal"]) == (D, causal)]
            values = _by_length([(r["implementation"], r["S"], r["tflops"]) for r in rows])
            head = f"D {D}, {'causal' if causal else 'full'}"
            x = 8 + column * (WIDTH - 16) / 2
            panel = Panel(x, y, (WIDTH - 16) / 2, 216, head, "tokens", "TFLOP/s")
            curves(drawing, panel, values, SERIES, top)
        y += 224
    return drawing


def forward(results: Results) -> Drawing:
    """Forward passes by length, beside their peers."""
    return _sweep(results, "forward", "Forward pass in bfloat16")


def backward(results: Results) -> Drawing:
    """Backward passes by length, beside their peers."""
    return _sweep(results, "backward", "Backward pass in bfloat16")


def decode(results: Results) -> Drawing:
    """The latency of one query token by the number of cached keys, for three batch sizes."""
    records = [r for r in results.records("decode") if (r["Hq"], r["D"]) == (32, 128)]
    chosen = [name for name in NAMES if any(name in r["results"] for r in records)]
    title = f"Decoding, one token, {results.device('decode')}"
    names = {NAMES[name][0] for name in chosen}
    drawing, y = _headed(title, results.source("decode"), names)
    for row, B in enumerate((1, 64)):
        rows = [r for r in records if r["B"] == B]
        values = _by_length(
            [(n, r["S"], r["results"][n]) for r in rows for n in chosen if n in r["results"]]
        )
        head = f"{B} row{'s' * (B > 1)}, 32 query heads, 8 key heads of 128"
        panel = Panel(8, y + row * 244, WIDTH - 16, 236, head, "cached keys of a row", "µs")
        curves(drawing, panel, values, SERIES, logarithmic=True)
    return drawing


def memory(results: Results) -> Drawing:
    """The peak memory of forward and backward by length."""
    records = [r for r in results.records("memory") if "mib" in r]
    values = _by_length([(r["implementation"], r["S"], r["mib"]) for r in records])
    title = f"Memory of causal attention, {results.device('memory')}"
    drawing, y = _headed(title, results.source("memory"), set(values))
    one = records[0]
    head = f"{one['B']} x {one['Hq']} heads of {one['D']}, {one['dtype']}, forward and backward"
    panel = Panel(8, y, WIDTH - 16, 300, head, "tokens", "peak MiB")
    curves(drawing, panel, values, SERIES, logarithmic=True)
    return drawing


def _variant(records: list[dict], workload: str, variant: str) -> dict:
    return next(r for r in records if (r["workload"], r["variant"]) == (workload, variant))


def _fusion_rows(records: list[dict], measure: str, workloads: dict[str, str]) -> list[Comparison]:
    unit, better, digits = {"ms": ("ms", "as fast", 1), "gib": ("GiB", "less", 2)}[measure]
    rows = []
    for workload, label in workloads.items():
        before, after = (_variant(records, workload, v)[measure] for v in ("inductor", "fused"))
        words = f"Inductor alone {before:.{digits}f} {unit}, fused {after:.{digits}f} {unit}"
        rows.append(Comparison(label, words, before, after, better))
    return rows


def fusion(results: Results) -> Drawing:
    """Attention written by hand under torch.compile: the pass beside Inductor alone."""
    records = results.records("fusion")
    title = f"Llama with attention written by hand, {results.device('fusion')}"
    drawing = Drawing(WIDTH, title, results.source("fusion"))
    drawing.text(16, 30, title, "title")
    times = {
        "prefill": "Prefill of 1 x 8192 tokens, 8 layers",
        "train": "Training step of 2 x 4096 tokens, 4 layers",
    }
    memory = {name: f"{label}: peak memory" for name, label in times.items()}
    rows = _fusion_rows(records, "ms", times) + _fusion_rows(records, "gib", memory)
    bars(drawing, 20, 50, WIDTH - 40, rows)
    return drawing


def _kernels(results: Results, name: str, label: str) -> Comparison:
    """The geometric mean over all problems of the best peer's time divided by that of fa_ops."""
    times: dict[tuple, dict[str, float]] = defaultdict(dict)
    for r in results.records(name):
        times[r["D"], r["causal"], r["S"]][r["implementation"]] = r["ms"]
    ratios = []
    for row in times.values():
        ours = row.pop("fa_ops hopper")
        ratios.append(min(row.values()) / ours)
    peers = [NAMES[peer][0] for peer in row]
    words = f"geometric mean of {len(ratios)} problems, to the best of {', '.join(peers)}"
    words = words.replace("FlashAttention ", "FA").replace(" (SDPA)", "")
    return Comparison(label, words, statistics.geometric_mean(ratios), 1.0, "as fast")


def _model(results: Results, case: str, label: str) -> Comparison:
    rows = [r for r in results.records("transformers") if r["case"] == case and r["compiled"]]
    times = {r["implementation"]: r.get("ms") or r["ms_per_token"] for r in rows}
    before, after = times["sdpa"], times["fa_ops"]
    words = f"compiled, SDPA {before:g} ms, fa_ops {after:g} ms"
    return Comparison(label, words, before, after, "as fast")


def _peaks(results: Results, label: str) -> Comparison:
    """Memory at the largest length at which attention written by hand could be measured."""
    records = [r for r in results.records("memory") if "mib" in r]
    S = max(r["S"] for r in records if r["implementation"] == "eager")
    peaks = {r["implementation"]: r["mib"] for r in records if r["S"] == S}
    before, after = peaks["eager"], peaks["fa_ops"]
    words = f"{S} tokens, written by hand {before:.0f} MiB, fa_ops {after:.0f} MiB"
    return Comparison(label, words, before, after, "less")


def overview(results: Results) -> Drawing:
    """One picture of the gains: kernels, compiled models, transformers, memory."""
    names = ("forward", "backward", "memory", "fusion", "transformers")
    title = f"What fa_ops gains, {results.device(*names)}"
    drawing = Drawing(WIDTH, title, "; ".join(results.source(name) for name in names))
    drawing.text(16, 30, title, "title")
    drawing.text(16, 52, "Bars: time or memory with fa_ops, as a part of that without", "faint")
    fused = results.records("fusion")
    prefill = {"prefill": "Llama, attention written by hand, torch.compile: prefill"}
    memory = {"train": "The same, training step: peak memory"}
    rows = [
        _kernels(results, "forward", "Forward kernels"),
        _kernels(results, "backward", "Backward kernels"),
        _peaks(results, "Memory of causal attention, forward and backward"),
        *_fusion_rows(fused, "ms", prefill),
        *_fusion_rows(fused, "gib", memory),
        _model(results, "8 documents packed to 8192", "transformers, training on packed documents"),
        _model(
            results,
            "batch 16, 32768 of 32832 filled",
            "transformers, decoding, batch of 16, 32k cached keys",
        ),
    ]
    bars(drawing, 20, 72, WIDTH - 40, rows)
    return drawing


FIGURES: dict[str, Callable[[Results], Drawing]] = {
    "overview": overview,
    "forward": forward,
    "backward": backward,
    "decode": decode,
    "memory": memory,
    "fusion": fusion,
    "alignment": diagrams.alignment,
    "masks": diagrams.masks,
    "packed": diagrams.packed,
    "pages": diagrams.pages,
    "ring": diagrams.ring,
}
