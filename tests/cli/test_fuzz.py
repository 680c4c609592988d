"""`python -m fa_ops fuzz`: its counts, the failures that it finds, crashes and hangs."""

from __future__ import annotations

import json
import os
import random
import re
import time

import pytest
import torch
from typer.testing import CliRunner

from fa_ops.backends import cpu
from fa_ops.call.call import is_prefill
from fa_ops.cli import app, fuzz
from fa_ops.cli.fuzz import FuzzRun, Target, family_of, outcomes, plan
from fa_ops.plans import planning
from fa_ops.testing import random_calls
from fa_ops.testing.quantized import QuantizedCase

CPU = Target("cpu", "cpu", (torch.float32, torch.float16))


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["fuzz", *arguments])


def test_cases_of_each_feature_are_counted(tmp_path):
    path = tmp_path / "fuzz.json"
    options = "--backend cpu,reference --device cpu --cases 42 --each 4 --workers 1 --json"
    result = invoke(*options.split(), str(path))
    assert result.exit_code == 0, result.output
    assert "42 of 42 cases of 12 specialisations" in result.output
    assert "1 processes: 0 failed" in result.output
    for record in json.loads(path.read_text())["records"]:
        counts, features = record["counts"], record["features"]
        assert counts["cases"] == 21 == sum(counts[kind] for kind in random_calls.KINDS)
        assert counts["specialisations"] == 6 and counts["failed"] == 0
        differentiable = counts["dense"] + counts["packed"] + counts["selected"]
        assert counts["gradients"] == differentiable > 0
        assert sum(features[dtype] for dtype in features if "float" in dtype) >= 21
        assert not record["failures"]


def with_planted_bug(forward):
    """`forward` with a wrong last row, in calls with sinks only."""

    def wrong(call):
        out, lse = forward(call)
        if call.operands.sinks is not None:
            out[..., -1:, :] += 0.5
        return out, lse

    return wrong


def test_failures_are_found_and_repeated_by_the_printed_command(monkeypatch):
    right = cpu.forward
    monkeypatch.setattr(cpu, "forward", with_planted_bug(right))
    options = "--backend cpu --device cpu --kind dense,packed --cases 40 --each 3 --workers 0"
    result = invoke(*options.split())
    assert result.exit_code == 1
    lines = re.findall(r"^failed: python -m fa_ops fuzz (.*)$", result.output, re.M)
    assert lines and lines[0].endswith("--kind dense,packed --seed " + lines[0].split("--seed ")[1])
    assert re.search(r"  Case\(.*sinks=True.*: out: error", result.output)
    repeated = invoke(*lines[0].split())
    assert repeated.exit_code == 1 and "1 of 1 cases of 1 specialisations" in repeated.output
    message = re.compile(r"^  Case\(.*$", re.M)
    assert message.search(repeated.output)[0] in result.output
    monkeypatch.setattr(cpu, "forward", right)
    planning.forget()
    assert invoke(*lines[0].split()).exit_code == 0


def test_wrong_tangents_are_found(monkeypatch):
    options = "--backend cpu --device cpu --tangents --cases 4 --each 2 --workers 0".split()
    result = invoke(*options)
    assert result.exit_code == 0 and "4 of 4 cases" in result.output, result.output
    right = cpu.tangents_of

    def wrong(call):
        results = right(call)
        if not call.is_backward:
            results[1][..., -1] += 1.0  # of lse
        return results

    monkeypatch.setattr(cpu, "tangents_of", wrong)
    planning.forget()
    result = invoke(*options)
    assert result.exit_code == 1 and ": tangent of lse: " in result.output
    assert re.search(r"^failed: .* --device cpu --tangents --seed \d+ --case", result.output, re.M)
    assert "--tangents has no --arena" in invoke(*options, "--arena").output.replace("\n", " ")


def test_a_number_always_selects_the_same_case():
    first, second = (
        [(o.kind, o.features) for o in outcomes(FuzzRun(CPU, 3, 0, 4))] for _ in range(2)
    )
    assert first == second
    assert family_of(CPU, 3) == family_of(CPU, 3) != family_of(CPU, 8)


def test_kinds_are_chosen_by_name():
    kinds = {family_of(CPU._replace(kinds=("quantized", "cached")), i).kind for i in range(6)}
    assert kinds == {"quantized", "cached"}


def test_kinds_that_a_backend_lacks_become_dense(monkeypatch):
    """As on GPUs, where a search for a call that there is none of would fail."""
    monkeypatch.setattr(fuzz, "refusal", lambda backend, case: lacks(case) or None)

    def lacks(case):
        lists = getattr(case, "lists", None)
        return "no lists" if lists is not None else isinstance(case, QuantizedCase) and "no 8 bits"

    kinds = [family_of(CPU, number).kind for number in range(len(fuzz.KINDS))]
    absent = {"selected", "quantized"}
    assert kinds == ["dense" if kind in absent else kind for kind in fuzz.KINDS]
    with pytest.raises(LookupError, match="cpu supports none of 20 selected calls"):
        monkeypatch.setattr(fuzz, "MAX_DRAWS", 20)
        family_of(CPU._replace(kinds=("selected",)), 0)


def test_a_backend_that_refuses_everything_is_a_failure(monkeypatch):
    monkeypatch.setattr(fuzz, "MAX_DRAWS", 20)
    (outcome,) = outcomes(FuzzRun(CPU._replace(backend="hopper"), 0, 0, 4))
    assert outcome.error.startswith("LookupError: hopper supports none of")


class ExitOnUnpickling(str):
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (7,)


class SleepOnUnpickling(str):
    """Blocks the process that unpickles it."""

    def __reduce__(self):
        return time.sleep, (60,)


def test_a_crash_or_hang_fails_one_case_and_the_others_continue(monkeypatch):
    runs = [FuzzRun(CPU._replace(backend=ExitOnUnpickling("cpu")), 0, 1, 3), FuzzRun(CPU, 1, 0, 2)]
    found = [(o.family, o.case, o.error) for o in fuzz.fuzz(runs, 1, None)]
    crash = "the process ended with status 7"
    assert found == [(0, 1, crash), (0, 2, crash), (1, 0, None), (1, 1, None)]
    monkeypatch.setattr(fuzz, "TIMEOUT", 0.0)
    hanging = FuzzRun(CPU._replace(backend=SleepOnUnpickling("cpu")), 1, 0, 1)
    (outcome,) = fuzz.fuzz([hanging], 1, None)
    assert outcome.error == "no result after 0 s"


def test_running_out_of_time_is_a_failure(monkeypatch):
    assert len(list(fuzz.fuzz([FuzzRun(CPU, 0, 0, 3)], 0, 1e-9))) == 1
    assert not list(fuzz.fuzz([FuzzRun(CPU, 0, 0, 3)], 1, 1e-9))
    monkeypatch.setattr("fa_ops.cli.fuzz.fuzz", lambda *_: iter(()))
    assert invoke("--device", "cpu", "--cases", "5").exit_code == 1


def test_plan_divides_the_cases_among_the_targets():
    runs = list(plan([CPU, CPU._replace(backend="reference")], 25, 5, seed=7))
    assert sum(run.last for run in runs) == 25
    assert [run.last for run in runs if run.target == CPU] == [5, 5, 3]
    assert [run.family for run in runs if run.target == CPU] == [7, 8, 9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--backend nothing", "--backend must be one of hopper, triton, cpu, reference"),
        ("--device tpu", "'tpu' is not one of"),
        ("--device cpu --dtype int8", "--dtype must be one of bfloat16, float16, float32, float64"),
        ("--device cpu --backend hopper", "--backend hopper: "),
        ("--json nowhere/a.json", "no such folder: nowhere"),
    ],
)
def test_invalid_options_are_refused(options, message):
    if "hopper" in options and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    result = invoke(*options.split())
    assert result.exit_code == 2 and message in result.output


def test_draws_cover_every_feature():
    seen: dict[str, set] = {kind: set() for kind in random_calls.KINDS}
    sizes = set()
    for kind in random_calls.KINDS:
        for seed in range(150):
            pick = random.Random(seed).choice
            family = random_calls.family(pick, kind, (torch.bfloat16, torch.float16, torch.float32))
            sizes.add(family.sizes)
            for _ in range(3):
                seen[kind].update(random_calls.features(family.case(pick)))
    everywhere = {"grouped heads", "causal", "window", "softcap", "ALiBi", "sinks", "scale given"}
    everywhere |= {"values of another width", "bfloat16", "float16", "float32"}
    ours = {"kv_lens", "dropout", "deterministic", "gradient of lse", "strided"}
    masks = {"key ranges", "bool mask", "float mask", "gradient of the mask"}
    caches = {"pages", "fp8 cache", "fp8 scales of pages", "keys appended", "rotary"}
    caches |= {"splits given", "batch invariant", "unified maximum", "key ranges"}
    assert everywhere | ours | masks | {"few queries, many keys"} <= seen["dense"]
    assert everywhere | ours <= seen["packed"]
    assert everywhere | caches <= seen["cached"]
    eight = {"int8", "scales given", "rotated", "keys without their mean", "NaN or Inf"}
    assert (everywhere - {"ALiBi"}) | eight | {"kv_lens", "key ranges"} <= seen["quantized"]
    assert sizes == {"ordinary", "decoding", "many", "prefill", "windows"}


def test_prefill_over_a_cache_is_drawn_on_gpus_only():
    families = [
        random_calls.family(random.Random(seed).choice, "cached", (torch.bfloat16,))
        for seed in range(40)
    ]
    many = [family for family in families if family.sizes == "prefill"]
    pick = random.Random(0).choice
    assert 0 < len(many) < 20
    for family in many:
        case = family.case(pick, "cuda")
        assert is_prefill(torch.empty(case.B, case.Hq, case.Sq, 1, device="meta"))
        assert family.case(pick, "cpu").Sq <= 16
