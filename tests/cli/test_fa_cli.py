"""`python -m fa_ops`: the output of its commands, and their errors."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from typer.testing import CliRunner

import fa_ops
from fa_ops.bench import command, timing
from fa_ops.cli import app, demo, doctor


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})


def masked(text: str) -> str:
    """The text without versions and names of hardware."""
    versions, rest = text.split("devices\n")
    text = re.sub(r"(?m)^(  \S+ +).*$", r"\1VERSION", versions) + "devices\n" + rest
    text = re.sub(r"(?m)^(  cuda +none: torch is) .*$", r"\1 REASON", text)
    return re.sub(r"(?m)^(  cpu +)\S+, \S+, \d+ threads$", r"\1MACHINE", text)


def test_help_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    for name in ("demo", "doctor", "warm", "fuzz", "bench"):
        assert name in result.output


def test_bench_is_the_command_group_of_the_benchmarks():
    result = invoke("bench", "--help")
    assert result.exit_code == 0
    assert "forward" in result.output and "backward" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="pins the report of a machine without a GPU")
def test_doctor(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("FA_OPS_BACKEND", raising=False)
    monkeypatch.setenv("FA_OPS_CACHE_DIR", "/nowhere/fa_ops")
    result = invoke("doctor")
    assert result.exit_code == 0
    assert_expected_inline(
        masked(result.output),
        """\
versions
  fa_ops         VERSION
  python         VERSION
  torch          VERSION
  triton         VERSION
  transformers   VERSION
  fa-ops-cubins  VERSION
devices
  cpu   MACHINE
  cuda  none: torch is REASON
backends
  hopper     needs a CUDA device
  triton     needs an NVIDIA GPU (or TRITON_INTERPRET=1, to try its kernels on the CPU)
  cpu        available
  reference  available
  in use     auto (the default)
cache
  folder   /nowhere/fa_ops (from FA_OPS_CACHE_DIR)
  verdict  does not exist yet; created when a kernel is first compiled
""",
    )


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"fa_ops {fa_ops.__version__}\n")


def test_doctor_runs_as_a_module():
    doctor = [sys.executable, "-m", "fa_ops", "doctor"]
    run = subprocess.run(doctor, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"fa_ops         {fa_ops.__version__}" in run.stdout


def test_doctor_names_the_backend_set_in_the_environment(monkeypatch):
    monkeypatch.setenv("FA_OPS_BACKEND", "reference")
    monkeypatch.setattr("fa_ops.call.backend_option.default", "reference")
    assert "in use     reference (from FA_OPS_BACKEND)" in invoke("doctor").output


def test_doctor_reports_an_unknown_backend_in_the_environment(monkeypatch):
    monkeypatch.setenv("FA_OPS_BACKEND", "flash")
    monkeypatch.setattr("fa_ops.call.backend_option.default", "flash")
    assert "every call will fail: backend must be 'auto' or one of" in invoke("doctor").output


def test_doctor_reports_owner_mode_and_verdict_of_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("FA_OPS_CACHE_DIR", raising=False)
    assert [name for name, _ in doctor.cache(tmp_path / "none")] == ["folder", "verdict"]
    (tmp_path / "kernel.cubin").write_bytes(bytes(3 * 2**19))
    user = f"{pwd.getpwuid(os.getuid()).pw_name} ({os.getuid()})"
    for mode, verdict in {
        0o700: "trusted, writable, 1 files, 1.5 MiB",
        0o770: "not used, each process compiles its kernels again: its group or others may write",
        0o707: "not used, each process compiles its kernels again: its group or others may write",
    }.items():
        tmp_path.chmod(mode)
        rows = dict(doctor.cache(tmp_path))
        assert (rows["folder"], rows["owner"], rows["mode"]) == (str(tmp_path), user, f"{mode:04o}")
        assert rows["verdict"].startswith(verdict)
    tmp_path.chmod(0o700)
    assert "Not a directory" in doctor.verdict(tmp_path / "kernel.cubin")
    assert "Not a directory" in dict(doctor.cache(tmp_path / "kernel.cubin" / "below"))["verdict"]
    assert "name too long" in dict(doctor.cache(tmp_path / ("d" * 300)))["verdict"]


def test_doctor_reports_a_cache_folder_that_is_not_writable(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    assert doctor.verdict(tmp_path).startswith("trusted, not writable")
    assert f"and {tmp_path} is not writable" in doctor.verdict(tmp_path / "none" / "below")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("demo", "--device", "tpu"), "'tpu' is not one of 'auto', 'cuda', 'cpu'"),
        (("demo", "--tokens", "0"), "Invalid value for '--tokens'"),
        (("demo", "--tokens", "many"), "Invalid value for '--tokens'"),
        (("demo", "extra"), "Got unexpected extra argument"),
        (("docter",), "No such command 'docter'. Did you mean 'doctor'?"),
        (("bench", "forwrd"), "No such command 'forwrd'. Did you mean 'forward'?"),
        (("colour",), "No such command 'colour'. Try"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_cuda_device_is_an_error():
    result = invoke("demo", "--device", "cuda")
    assert result.exit_code == 2
    assert "torch finds no CUDA device" in result.output


def test_demo_names_missing_packages(monkeypatch):
    needs = {"torch": "torch", "no_such_a": "package-a", "no_such_b": "package-b>=2"}
    monkeypatch.setattr(demo, "REQUIRED", needs)
    result = invoke("demo")
    assert result.exit_code == 1
    assert "pip install package-a 'package-b>=2'" in result.output


LAYERS = torch._dynamo.config.recompile_limit + 1


class Tokenizer:
    """The tokenizer methods that the demo calls."""

    def apply_chat_template(self, chat, **options):
        return {"input_ids": torch.arange(3, 10)[None]}

    def decode(self, tokens, **options):
        return f"{len(tokens)} words"


@pytest.fixture
def tiny(monkeypatch):
    """Replace the demo's model by a tiny Llama.

    It has more layers than the number of times that Dynamo compiles one function.
    """
    transformers = pytest.importorskip("transformers", reason="the demo needs transformers")
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=99)
    sizes |= dict(
        num_hidden_layers=LAYERS, num_key_value_heads=2, eos_token_id=None
    )  # no early end
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes)
    net = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    monkeypatch.setattr(demo, "REQUIRED", {})
    monkeypatch.setattr(demo, "load", lambda *_: demo.Model(net, Tokenizer()))
    monkeypatch.setattr(demo, "LENGTHS", (16, 32))
    yield net
    from compile_passes import uninstall

    uninstall()
    torch._dynamo.reset()


def test_demo_runs_the_model_in_four_modes(tiny):
    """All modes, Inductor included, generate the same tokens; both fused ones fuse all layers."""
    result = invoke("demo", "--device", "cpu", "--tokens", "4")
    assert result.exit_code == 0, result.output
    assert result.output.rstrip().endswith("in the documentation, under Performance.")
    rows = [line for line in result.output.splitlines() if "4 words" in line]
    assert len(rows) == 4
    assert all("all 4" in row for row in rows)
    fused = [re.search(rf"\d+ of {LAYERS}", row).group() for row in rows]
    assert fused == [f"{count} of {LAYERS}" for count in (0, 0, LAYERS, LAYERS)]
    assert "backend: cpu" in result.output and "SDPA" in result.output


def test_demo_reports_a_mode_that_fails(tiny, monkeypatch):
    def broken(net):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(demo, "MODES", {"eager": demo.MODES["eager"], "broken": broken})
    result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--tokens", "2"])
    assert result.exit_code == 1
    assert "broken: RuntimeError: no C++ compiler" in result.output
    assert "all 2" in result.output


def test_agreement_is_the_length_of_the_common_prefix():
    reference = torch.tensor([5, 6, 7, 8])
    assert demo._agreement(reference.clone(), reference) == "all 4"
    assert demo._agreement(torch.tensor([5, 6, 0, 8]), reference) == "the first 2 of 4"
    assert demo._agreement(torch.tensor([5, 6]), reference) == "the first 2 of 4"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counter")
def test_peak_memory_includes_memory_freed_during_the_step():
    peak = timing.peak_memory(lambda: torch.ones(64, 2**18).sum(), "cpu")
    assert 60 <= peak / 2**20 <= 80
    assert timing.peak_memory(lambda: None, "cpu") < 5 * 2**20


def test_peak_memory_is_none_where_the_peak_cannot_be_reset(monkeypatch):
    def refuse(path, text):
        raise FileNotFoundError(path)

    steps = []
    monkeypatch.setattr(Path, "write_text", refuse)
    assert timing.peak_memory(lambda: steps.append(1), "cpu") is None and steps == [1]


def test_words_are_split_at_commas():
    assert command.words(" a b,,c, a b,") == ["a b", "c"]
    assert command.words(None) == command.words(",") == []
