"""Type checkers see the public functions as users need them: mypy and pyright on users' code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import fa_ops
import fa_ops.distributed
from fa_ops.call import python_types
from tests.test_public_names import MODULES

ROOT = Path(__file__).parent.parent
USERS_CODE = """\
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import compile_passes
import fa_ops
from fa_ops.compat.flash_attn import flash_attn_func
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

Pair = tuple[Tensor, Tensor]


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, with_lse: bool) -> Tensor:
        loss = fa_ops.attention(q, k, v, is_causal=True, window=(4, None), enable_gqa=True).sum()
        assert_type(fa_ops.attention(q, k, v), Tensor)
        assert_type(fa_ops.attention(q, k, v, None, 0.1, True, scale=0.5), Tensor)
        assert_type(fa_ops.attention(q, k, v, return_lse=False), Tensor)
        assert_type(fa_ops.attention(q, k, v, return_lse=True, backend="cpu"), Pair)
        assert_type(fa_ops.attention(q, k, v, return_lse=with_lse), Tensor | Pair)
        aux = AuxRequest(max_scores=True)
        assert_type(fa_ops.attention(q, k, v, return_aux=aux), tuple[Tensor, AuxOutput])
        assert_type(fa_ops.attention_varlen(q, k, v, ends, None, page_table=ends), Tensor)
        assert_type(fa_ops.attention_varlen(q, k, v, ends, ends, 5, 5, return_lse=True), Pair)
        assert_type(fa_ops.attention_with_kv_cache(q, k, v, ends, key=k, value=v), Tensor)
        assert_type(fa_ops.attention_with_kv_cache(q, k, v, ends, return_lse=True), Pair)
        assert_type(fa_ops.quantized_attention(q, k, v, qk_dtype=torch.int8), Tensor)
        assert_type(fa_ops.quantized_attention(q, k, v, return_lse=True), Pair)
        assert_type(fa_ops.attention_selected(q, k, v, ends, block_size=32), Tensor)
        assert_type(fa_ops.attention_selected(q, k, v, ends, return_lse=True), Pair)
        assert_type(fa_ops.attention_selected_tokens(q, k, v, ends, counts=ends), Tensor)
        assert_type(fa_ops.attention_selected_tokens(q, k, v, ends, return_lse=True), Pair)
        flex, tiles = fa_ops.flex_attention, fa_ops.mask_tiles(causal, None, None, 9, 9)
        assert_type(flex(q, k, v, alibi, tiles, mask_mod=causal, buffers=(ends,)), Tensor)
        assert_type(flex(q, k, v, None, None, 0.5, True, False, {}, window=(4, 0)), Tensor)
        assert_type(flex(q, k, v, alibi, return_lse=True, is_causal=True), Pair)
        assert_type(flex(q, k, v, return_lse=with_lse), Tensor | Pair)
        both = flex(q, k, v, return_aux=AuxRequest(lse=True))
        assert_type(both, tuple[Tensor, AuxOutput])
        parallel = fa_ops.distributed.context_parallel_attention
        assert_type(parallel(q, k, v, scheme="ring", is_causal=True), Tensor)
        assert_type(parallel(q, k, v, return_lse=True), Pair)
        sharded = fa_ops.distributed.attention_with_sharded_kv_cache
        assert_type(sharded(q, k, v, ends, return_lse=True), Pair)
        assert_type(sharded(q, k, v, ends, check=True), Tensor)
        assert_type(fa_ops.merge_states([q, q], [q, q]), Pair)
        assert_type(fa_ops.explain(q, k, v, is_causal=True).kernel, str | None)
        out, lse, weights = flash_attn_func(q, k, v, return_attn_probs=True)
        assert_type(out, Any)
        return loss


def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - (i - j).abs()


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def wrong(q: Tensor) -> None:
    fa_ops.flex_attention(q, q, q, causal=True)  # type: ignore[call-overload]
    fa_ops.flex_attention(q, q, q, return_lse=True).sum()  # type: ignore[attr-defined]
    fa_ops.attention_selected(q, q, q)  # type: ignore[call-overload]
    fa_ops.attention_selected_tokens(q, q, q, q, block_size=3)  # type: ignore[call-overload]
    fa_ops.attention(q, q, q, causal=True)  # type: ignore[call-overload]
    fa_ops.attention(q, q, q, window=4)  # type: ignore[call-overload]
    fa_ops.attention(q, q, q, return_lse=True).sum()  # type: ignore[attr-defined]
    fa_ops.attention_varlen(q, q, q, q)  # type: ignore[call-overload]


with fa_ops.use_backend("cpu"):
    compile_passes.install()
model: Any = torch.compile(Layer())
"""


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, env=environment, capture_output=True, text=True
    )


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'fa-ops[test]'")


def public_functions() -> list[FunctionType]:
    found = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # diffusers is not installed
            continue
        values = (getattr(module, name) for name in getattr(module, "__all__", ()))
        found += [inspect.unwrap(value) for value in values if isinstance(value, FunctionType)]
    return found


def mypy(folder: Path, *files: str, follow_imports: str = "silent") -> list[str]:
    """What mypy says of files in strict mode, where a comment that ignores no error is one too."""
    need("mypy")
    result = run(
        "mypy", "--strict", f"--follow-imports={follow_imports}", "--cache-dir=cache",
        "--no-error-summary", *files, cwd=folder,
    )  # fmt: skip
    assert not result.stderr, result.stderr
    return result.stdout.splitlines()


def test_mypy_accepts_users_code(tmp_path):
    (tmp_path / "users.py").write_text(USERS_CODE)
    assert not mypy(tmp_path, "users.py")


def test_signatures_of_public_functions_are_complete(tmp_path):
    """Every argument and result has a type, with its parameters, as mypy's strict mode asks."""
    functions, errors = public_functions(), {}
    files = {inspect.getsourcefile(function) for function in functions}
    for line in mypy(tmp_path, *sorted(files), follow_imports="skip"):
        path, number, text = line.split(":", 2)
        if text.endswith(("[no-untyped-def]", "[type-arg]")):  # others come from what is skipped
            errors[path, int(number)] = text.strip()
    wrong = []
    for function in functions:
        path, at = inspect.getsourcefile(function), function.__code__.co_firstlineno
        (node,) = (
            node for node in ast.walk(ast.parse(Path(path).read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == function.__name__
            and at <= node.lineno <= at + len(node.decorator_list)
        )  # fmt: skip
        lines = range(at, node.body[0].lineno)
        wrong += [f"{function.__name__}: {errors[path, n]}" for n in lines if (path, n) in errors]
    assert not wrong


def test_pyright_accepts_users_code(tmp_path):
    need("basedpyright")
    (tmp_path / "users.py").write_text(USERS_CODE)
    options = {
        "include": ["users.py"], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard",
        "enableTypeIgnoreComments": True, "reportUnnecessaryTypeIgnoreComment": "error",
    }  # fmt: skip
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    result = run("basedpyright", "--pythonpath", sys.executable, "--outputjson", cwd=tmp_path)
    report = json.loads(result.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    assert not [
        (d["range"]["start"]["line"] + 1, d["message"]) for d in report["generalDiagnostics"]
    ]


@pytest.mark.parametrize(
    "function, options, others",
    [
        (fa_ops.attention, python_types.DenseOptions, "return_aux"),
        (fa_ops.attention_varlen, python_types.PackedOptions, ""),
        (fa_ops.attention_with_kv_cache, python_types.CachedOptions, ""),
        (fa_ops.quantized_attention, python_types.QuantizedOptions, ""),
        (fa_ops.flex_attention, python_types.FlexOptions, "return_aux"),
        (fa_ops.attention_selected, python_types.SelectedOptions, ""),
        (fa_ops.attention_selected_tokens, python_types.SelectedTokensOptions, ""),
        (
            fa_ops.distributed.context_parallel_attention, python_types.ContextParallelOptions,
            "layout transport check timeout",
        ),
        (
            fa_ops.distributed.attention_with_sharded_kv_cache, python_types.ShardedCacheOptions,
            "check timeout",
        ),
    ],
)  # fmt: skip
def test_overloads_have_the_options_of_the_function(function, options, others):
    parameters = inspect.signature(function).parameters.values()
    wanted = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    wanted.pop("return_lse", None)  # torch's flex_attention takes it by position too
    for name in others.split():
        del wanted[name]
    found = {
        name: getattr(kind, "__forward_arg__", kind)
        for base in (python_types.ShardedCacheOptions, options, python_types.ScoreOptions)
        for name, kind in vars(base)["__annotations__"].items()
        if name in options.__annotations__
    }
    assert found == wanted and options.__annotations__.keys() == wanted.keys()
