"""`bench flex`, `derivatives` and `selected`: what is timed is right, and what is reported."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fa_ops.bench import comparison, derivatives, flex, selected, timing
from fa_ops.bench.comparison import Quantity, forward_run
from fa_ops.bench.timing import Time
from fa_ops.cli import bench as app

TOKENS = selected.TokenListProblem(3, 2, 32, 4, D=16, Dv=8)
BLOCKS = selected.BlockListProblem("NSA", 70, 2, 1, 16, 16, 3, 3)
COMMANDS = {
    "flex": ("--tokens 64 --only softcap,offset", {"forward", "backward"}),
    "flex of masks": ("--masks --tokens 300 --only tree", {"tiles"}),
    "derivatives": (
        "--lengths 32 --tokens 32 --width 16 --head-dims 16", set(derivatives.BASELINES)
    ),
    "selected": ("", {"forward", "backward"}),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_implementations_agree_and_are_timed(name, tmp_path, monkeypatch):
    monkeypatch.setitem(selected.GRIDS, "cpu", [TOKENS, BLOCKS])
    # once for each implementation, which takes half a second among the objects of other tests
    monkeypatch.setattr(timing.gc, "collect", int)
    (options, wanted), family = COMMANDS[name], name.split()[0]
    path = tmp_path / "out.json"
    given = ["--device", "cpu", "--budget", "0.1", "--json", str(path), *options.split()]
    result = CliRunner().invoke(app, [family, *given])
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"{family}, ") and "WRONG" not in result.output
    content = json.loads(path.read_text())
    records = content["records"]
    assert content["family"] == family and {r["quantity"] for r in records} == wanted
    for record in records:  # torch has no gradients of functions on a CPU
        refused = record["implementation"] == flex.EAGER and record["quantity"] == "backward"
        assert ("not_timed" in record) == refused, record
        assert refused or record["ms"] > 0
    if name == "flex":
        timed = {r["implementation"] for r in records if "ms" in r}
        assert timed == {flex.OURS, flex.OPTIONS, flex.EAGER}
        assert "D64 causal" in result.stdout and "T5" not in result.stdout


def test_an_interrupted_command_prints_what_it_has_measured(monkeypatch, capsys):
    measured = []

    def measure(quantity, *rest):
        if measured:
            raise KeyboardInterrupt
        measured.append(quantity)
        return [comparison.TimedQuantity(quantity, "ours", Time(1.0, 1.0, 1.0, 1), 0.0)]

    monkeypatch.setattr(comparison, "measure", measure)
    wanted = [Quantity(f"problem {n}", "forward", dict) for n in range(3)]
    comparison.compare("flex", wanted, ["ours"], "cpu", 0.1, None)
    assert measured == wanted[:1]
    printed = capsys.readouterr().out
    assert "problem 0" in printed and "problem 1" not in printed


def test_wrong_results_and_errors_are_reasons():
    x = torch.ones(3)
    builds = {
        "right": lambda: forward_run(lambda: x),
        "wrong": lambda: forward_run(lambda: x * 1.01),
        "nan": lambda: forward_run(lambda: x * torch.nan),
        "another": lambda: forward_run(lambda: x * 2.0),
        "missing": lambda: forward_run(lambda: x @ torch.ones(4)),
    }
    quantity = Quantity("p", "forward", lambda: builds, others=("another",))
    rows = {row.implementation: row for row in comparison.measure(quantity, "cpu", 0.1)}
    assert [name for name, row in rows.items() if row.time] == ["right", "another"]
    assert rows["wrong"].reason.startswith("AssertionError: WRONG: result 0 differs by 0.01")
    assert "WRONG" in rows["nan"].reason and rows["missing"].reason.startswith("RuntimeError")
    assert rows["right"].difference == 0.0 and rows["another"].difference is None


def test_the_table_has_ratios_to_the_first_implementation_and_to_the_baseline():
    times = {("a", "forward"): (2.0, 3.0), ("a", "jvp"): (5.0, None)}
    rows = []
    for (problem, name), pair in times.items():
        q = Quantity(problem, name, dict, None if name == "forward" else ("a", "forward"))
        for implementation, ms in zip(("ours", "theirs"), pair):
            time = None if ms is None else Time(ms, ms, ms, 1)
            rows.append(comparison.TimedQuantity(q, implementation, time, 7.0))
    cells = [list(column.cells) for column in comparison.table("", rows).columns]
    assert cells[2:] == [["2.000 (7 MiB)", "5.000 (7 MiB)"], ["3.000 (1.50x, 7 MiB)", "-"],
                         ["-", "2.50x"]]  # fmt: skip
    assert list(comparison.summaries(rows)) == [
        "theirs, forward: 1.50x to 1.50x of our time, geometric mean 1.50x over 1"
    ]


def test_pairs_of_lists_are_counted_as_their_mask_keeps_them():
    lists = BLOCKS.lists("cpu")
    assert BLOCKS.flops(lists) == 4.0 * BLOCKS.D * int(BLOCKS.mask(lists).sum())
    _, _, tokens = TOKENS.draw("cpu")
    assert all(len(set(row)) == TOKENS.count for row in tokens.tolist())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("flex --tokens 64,128", "must be one length without --masks"),
        ("flex --only none", "no function is called 'none'"),
        ("flex --masks --only none", "no mask is called 'none'"),
        ("derivatives --only third", "no quantity is called 'third'"),
        ("selected --only dense", "no problem is called 'dense'"),
        ("derivatives --lengths 0", "must be positive integers, got '0'"),
    ],
)
def test_unknown_names_and_numbers_are_refused(arguments, message):
    result = CliRunner().invoke(app, [*arguments.split(), "--device", "cpu"])
    words = " ".join(line.strip("│ ") for line in result.output.splitlines())
    assert result.exit_code == 2 and message in words
