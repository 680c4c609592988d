"""The benchmark commands, end to end on the smallest grid."""

import io
import json

import pytest
import torch
from rich.console import Console
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from fa_ops.bench import command, cpu, features, problems, sweep
from fa_ops.cli import bench as app


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize("family", ["forward", "backward"])
def test_sweeps_print_a_table_and_write_every_result(family, tmp_path):
    path = tmp_path / "out.json"
    result = run(family, "--preset", "tiny", "--device", "cpu", "--budget", "1", "--json", path)
    assert result.exit_code == 0, result.output
    assert "fa_ops cpu" in result.output and "against best peer" in result.output
    content = json.loads(path.read_text())
    assert content["family"] == family
    assert {"command", "device", "torch", "threads"} <= content["environment"].keys()
    times = {(r["implementation"], r["causal"]): r["ms"] for r in content["records"]}
    assert times.keys() == {
        (name, causal)
        for name in ("fa_ops cpu", "sdpa flash", "sdpa math")
        for causal in (False, True)
    }
    assert min(times.values()) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default of a machine without a GPU")
def test_without_a_gpu_the_default_grid_is_for_cpus(monkeypatch):
    monkeypatch.setitem(sweep._GRIDS, "cpu", problems.PRESETS["tiny"])
    result = run("forward", "--budget", "1", "--only", "fa_ops cpu")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[0].endswith(": 2 problems; fa_ops cpu")


def test_the_header_and_the_current_problem_are_shown_while_a_benchmark_runs(monkeypatch):
    """Each is on stderr before the problem is measured, with a terminal and without one."""
    seen = []
    monkeypatch.setattr(
        command, "Console", lambda stderr, **o: Console(file=out, force_terminal=terminal, **o)
    )
    for terminal in (False, True):
        out = io.StringIO()
        for step in command.watched(["D16 full", "D16 causal"], "forward", "cpu", ["a", "b"]):
            seen.append(out.getvalue())
            assert "2 problems; a, b" in seen[-1] and step in seen[-1], terminal
        assert "D16 causal" not in seen[-2]
    assert seen[0].splitlines()[1:] == ["forward 1/2: D16 full"]


def test_plot_writes_a_png(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs the extra `bench`")
    path = tmp_path / "out.png"
    run("forward", "--preset", "tiny", "--device", "cpu", "--budget", "1", "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("forward", "--preset", "nope"), "'nope' is not one of 'standard', 'lengths'"),
        (("forward", "--only", "flsh"), "no implementation is called 'flsh'"),
        (("host", "--device", "tpu"), "'tpu' is not one of 'auto', 'cuda', 'cpu'"),
        (("forward", "--preset", "tiny", "--json", "nowhere/a.json"), "no such folder: nowhere"),
        (("forward", "--preset", "tiny", "--plot", "nowhere/a.png"), "no such folder: nowhere"),
        (("decode", "--json", "nowhere/a.json"), "no such folder: nowhere"),
        (("features", "--only", "softcup"), "no feature is called 'softcup'"),
        (("features", "--budget", "-1"), "Invalid value for '--budget'"),
        (("features", "--kv-heads", "3"), "16 query heads are no multiple of 3 key heads"),
        (("forward", "--threads", "0"), "Invalid value for '--threads'"),
        (("cpu", "--only", "softcup"), "no contender is called 'softcup'"),
        (("cpu", "--preset", "large"), "Invalid value for '--preset'"),
        (("cpu", "--length", "0"), "Invalid value for '--length'"),
        (("features", "--tokens", "0"), "Invalid value for '--tokens'"),
    ],
)
def test_invalid_options_are_refused(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    words = " ".join(line.strip("│ ") for line in result.output.splitlines())
    assert message in words


def test_small_calls_are_measured_beside_sdpa_and_give_its_results():
    result = run("cpu", "--preset", "small", "--rounds", 1, "--only", "32 x 16,cache")
    assert result.exit_code == 0, result.output
    names = list(cpu.small_problems())
    for name in names:
        assert (name in result.stdout) == ("32 x 16" in name or "cache" in name), name
    assert result.stderr.splitlines()[0].endswith(": 7 problems; fa_ops cpu, SDPA")
    for name, (ours, theirs) in cpu.small_problems().items():
        with torch.no_grad():
            found, expected = (one.call(*one.inputs) for one in (ours, theirs))
        tolerance = 1e-5 if found.dtype == torch.float32 else 0.02
        assert (found - expected).abs().max() < tolerance, name


def test_features_are_compared_with_plain_causal_attention(tmp_path):
    path = tmp_path / "features.json"
    options = ("--device", "cpu", "--tokens", 256, "--heads", 2, "--budget", 1, "--json", path)
    result = run("features", *options)
    assert result.exit_code == 0, result.output
    for name in ("causal", "causal as key_ranges", "causal, softcap 30", "16 packed documents"):
        assert name in result.output
    rows = json.loads(path.read_text())["records"]
    assert all(set(row["ms"]) == {"forward", "backward"} for row in rows) and len(rows) == 18


def test_features_are_measured_with_groups_of_query_heads():
    options = ("--tokens", 64, "--heads", 4, "--kv-heads", 2, "--only", "deterministic")
    result = run("features", "--device", "cpu", "--budget", 1, *options)
    assert result.exit_code == 0, result.output
    assert "4/2 heads of 128" in result.output and "causal, deterministic" in result.output


@pytest.mark.parametrize("S", [1, 2, 64, 100, 256, 300, 16384])
def test_lengths_of_packed_documents_add_up_to_all_tokens(S):
    lengths = features.mixed_lengths(S)
    assert sum(lengths) == S and min(lengths) > 0


def test_features_agree_with_flex_attention():
    S, H = 64, 2
    q, k, v = (torch.randn(1, H, S, 128, dtype=torch.float64) for _ in range(3))
    for name, make in features.features(H, S, "cpu").items():
        feature = make()
        ours = features._ours(feature, "cpu")(q, k, v)
        if feature.keep is not None:
            mask = create_block_mask(feature.keep, None, None, S, S, device="cpu")
            flex = flex_attention(q, k, v, block_mask=mask, score_mod=feature.score)
            torch.testing.assert_close(ours, flex, msg=lambda m, n=name: f"{n}: {m}")


class Allocations(TorchDispatchMode):
    """Records the size of the largest tensor that an operator returns, in elements."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_masks_are_created_for_measured_features_only():
    S = 512
    with Allocations() as allocations:
        known = features.features(2, S, "cpu")
        for make in features.choose(known, "softcap,ALiBi,key_ranges").values():
            make()
        assert allocations.largest < 10 * S
        for make in features.choose(known, "float mask").values():
            make()
        assert allocations.largest == S * S


def test_cpu_is_compared_with_atens_kernel():
    result = run("cpu", "--length", 64, "--rounds", 1, "--only", "softcap,sinks")
    assert result.exit_code == 0, result.output
    for name in ("SDPA, aten flash", "causal, softcap", "causal, sinks"):
        assert name in result.output
