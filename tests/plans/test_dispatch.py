"""Backend selection: by name, context manager and environment variable, with reasons."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import expecttest
import pytest
import torch

import fa_ops
from fa_ops.call import backend_option
from fa_ops.call.call import attention_call, rows_are_aligned
from fa_ops.plans import dispatch, planning

ENDS = torch.zeros(1, dtype=torch.int32)


def qkv(**options):
    return [torch.randn(1, 2, 4, 8, **options) for _ in range(3)]


def chosen(q, k, v, **arguments):
    """The backend of a call."""
    return dispatch.choose(planning.normalised(attention_call(q, k, v, **arguments)))


def test_auto_takes_the_cpu_backend_for_cpu_tensors():
    assert chosen(*qkv()) is dispatch.load("cpu")
    assert "triton" not in dispatch.AUTO["cpu"]
    assert all("reference" not in names for names in dispatch.AUTO.values())


def test_a_named_backend_never_falls_back(monkeypatch):
    monkeypatch.setattr(dispatch.load("cpu"), "supports", lambda call: "not today")
    with pytest.raises(NotImplementedError, match="backend 'cpu' cannot run this call: not today"):
        fa_ops.attention(*qkv(), backend="cpu")


@pytest.mark.parametrize(
    "name, missing, pays",
    [
        (None, (), True),
        (None, ("hopper",), True),
        (None, ("triton",), False),
        ("hopper", (), False),
        ("triton", (), True),
        ("reference", (), False),
    ],
)
def test_masks_are_summarised_where_a_backend_may_and_it_pays(name, missing, pays, monkeypatch):
    """hopper skips by the blocks of a mask, but does not make them."""
    monkeypatch.setattr(backend_option, "default", name)
    errors = dict.fromkeys(missing, "is missing")
    monkeypatch.setattr(dispatch, "available_error", errors.get)
    assert dispatch.skips_tiles("cuda") is pays


def test_triton_merges_where_hopper_is_the_default(monkeypatch):
    """A cache over several processes needs both."""
    hopper, seen = dispatch.load("hopper"), []
    monkeypatch.setattr(hopper, "support_error", lambda *call: None)
    outs, lses = torch.randn(2, 3, 8), torch.randn(2, 3)
    assert "no kernel that merges" in hopper.merge_error(outs)
    load = dispatch.load
    monkeypatch.setattr(dispatch, "load", lambda name: seen.append(name) or load("cpu"))
    monkeypatch.setattr(dispatch, "_available", {"hopper": None, "triton": None})
    with fa_ops.use_backend("hopper"):
        fa_ops.merge_states(outs, lses)
    assert seen == ["triton"]


def test_auto_says_what_every_backend_said(monkeypatch):
    monkeypatch.setattr(dispatch.load("cpu"), "supports", lambda call: "not today")
    with pytest.raises(NotImplementedError, match="on cpu:\n  cpu: not today"):
        fa_ops.attention(*qkv())


def test_a_backend_may_refuse_by_how_many_keys_there_are(monkeypatch):

    def refuse(call):
        return "too long" if call.num_keys > 2**29 else None

    monkeypatch.setattr(dispatch.load("cpu"), "supports", refuse)
    q, k, _ = qkv()
    far = torch.zeros(1, 2, 1, 8).expand(-1, -1, 2**29 + 1, -1)
    tokens = torch.zeros(1, 2, 8).expand(2**29 + 1, -1, -1)
    for short, long, select in (
        (k, far, lambda k: chosen(q, k, k)),
        (k[0], tokens, lambda k: chosen(q[0], k, k, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS)),
        (k, far, lambda k: chosen(q, k, k, over_cache=True)),
    ):
        assert select(short) is dispatch.load("cpu")
        with pytest.raises(NotImplementedError, match="too long"):
            select(long)


def test_use_backend_can_be_nested(monkeypatch):
    assert backend_option.chosen() is None
    with fa_ops.use_backend("reference"):
        assert chosen(*qkv()) is dispatch.load("reference")
        with pytest.raises(RuntimeError), fa_ops.use_backend("auto"):
            assert chosen(*qkv()) is dispatch.load("cpu")
            raise RuntimeError
        assert backend_option.chosen() == "reference"
        assert chosen(*qkv(), backend="cpu") is dispatch.load("cpu")
    assert backend_option.chosen() is None


def test_one_use_backend_can_be_nested(monkeypatch):
    monkeypatch.setattr(backend_option, "default", None)
    chosen = fa_ops.use_backend("reference")
    with chosen, fa_ops.use_backend("cpu"):
        with chosen:
            assert backend_option.chosen() == "reference"
        assert backend_option.chosen() == "cpu"
    assert backend_option.chosen() is None


def test_use_backend_holds_for_the_backward_of_its_calls(monkeypatch):
    """The function hands the name to autograd, so a backward outside the block runs on it too."""
    q, k, v = qkv(requires_grad=True)
    with fa_ops.use_backend("reference"):
        out = fa_ops.attention(q, k, v)
    seen, choose = [], dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda call: seen.append(call.backend) or choose(call))
    out.sum().backward()
    assert seen == ["reference"]


def test_backends_lists_every_backend_with_its_reason():
    listed = dict(dispatch.backends())
    assert tuple(listed) == backend_option.BACKENDS
    assert listed["cpu"] is None and listed["reference"] is None
    if not torch.cuda.is_available():
        assert isinstance(listed["triton"], str)


def test_a_backend_that_cannot_be_imported_is_unavailable(monkeypatch):
    monkeypatch.setattr(dispatch, "_available", {})
    monkeypatch.setitem(sys.modules, "fa_ops.backends.triton", None)
    assert "cannot be imported" in dispatch.available_error("triton")


class TestExplain(expecttest.TestCase):
    def test_explain(self):
        gpu = "needs a CUDA device, got cpu"
        refusals = {"hopper": gpu, "triton": gpu, "cpu": None, "reference": None}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "refusal", lambda name, call: refusals[name])
            self.assertExpectedInline(
                str(fa_ops.explain(*qkv(), is_causal=True)),
                """\
backend: cpu
kernel: forward
route: direct
query: 1 row, 2 heads, 4 tokens, 8 features
key: 1 row, 2 heads, 4 tokens, 8 features
value: 1 row, 2 heads, 4 tokens, 8 features
causal, bottom right: query 0 attends key 0
  hopper: needs a CUDA device, got cpu
  triton: needs a CUDA device, got cpu
  cpu: can run this
  reference: can run this""",
            )
            self.assertExpectedInline(
                str(fa_ops.explain(*qkv(), backend="triton")),
                """\
backend: none
query: 1 row, 2 heads, 4 tokens, 8 features
key: 1 row, 2 heads, 4 tokens, 8 features
value: 1 row, 2 heads, 4 tokens, 8 features
  hopper: needs a CUDA device, got cpu
  triton: needs a CUDA device, got cpu
  cpu: can run this
  reference: can run this""",
            )


def test_unknown_names_are_refused():
    names = ", ".join(map(repr, backend_option.BACKENDS))
    with pytest.raises(ValueError) as error:
        fa_ops.use_backend("cuda")
    assert str(error.value) == f"backend must be 'auto' or one of {names}, got 'cuda'"


def run(code: str, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )


CALL = """
import torch, fa_ops
from fa_ops.call import backend_option
q = torch.randn(1, 1, 2, 4)
print(backend_option.default)
fa_ops.attention(q, q, q)
"""


def test_the_environment_variable_sets_the_default():
    result = run(CALL, FA_OPS_BACKEND="reference")
    assert result.returncode == 0 and result.stdout == "reference\n", result.stderr


def test_an_unknown_name_in_the_environment_variable_is_refused():
    result = run(CALL, FA_OPS_BACKEND="fast")
    assert "ValueError: backend must be 'auto' or one of" in result.stderr
    assert "got 'fast'" in result.stderr


def test_rows_are_aligned_if_their_strides_are_multiples_of_16_bytes():
    q = torch.randn(4, 8, 16, 128)
    single = q[:1, :1, :1].as_strided((1, 1, 1, 128), (3, 5, 7, 1))  # strides of sizes of 1
    assert rows_are_aligned(q) and rows_are_aligned(q.transpose(1, 2), single)
    odd = torch.randn(4, 8, 16, 130)[..., :128]
    for other in (odd, q.mT, q[..., 1:], q[:, :1].expand(4, 8, 16, 128), odd.half()[..., 2:]):
        assert not rows_are_aligned(q, other)


def in_thread(function, *args):
    """What a function returns in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(60)


def test_blocks_of_threads_may_overlap():
    entered, leave, left = (threading.Event() for _ in range(3))

    def first():
        with fa_ops.use_backend("reference"):
            entered.set()
            leave.wait(60)
            return backend_option.chosen()

    def second():
        entered.wait(60)
        with fa_ops.use_backend("cpu"):
            leave.set()
            left.wait(60)
            return backend_option.chosen()

    with ThreadPoolExecutor(2) as pool:
        found = pool.submit(first), pool.submit(second)
        assert found[0].result(60) == "reference"
        left.set()
        assert found[1].result(60) == "cpu"
    assert backend_option.chosen() is in_thread(backend_option.chosen) is None


def test_blocks_of_tasks_may_overlap():
    async def task(name, pause):
        with fa_ops.use_backend(name):
            await asyncio.sleep(pause)
            child = await asyncio.create_task(child_task())
            return backend_option.chosen(), child, await asyncio.to_thread(backend_option.chosen)

    async def child_task():
        return backend_option.chosen()

    async def outer():
        shared = fa_ops.use_backend("reference")

        async def one_object(pause):
            with shared:
                await asyncio.sleep(pause)
                return backend_option.chosen()

        tasks = task("reference", 0.02), task("cpu", 0.04), one_object(0.02), one_object(0.01)
        return *await asyncio.gather(*tasks), backend_option.chosen()

    *found, after = asyncio.run(outer())
    assert found == [("reference",) * 3, ("cpu",) * 3, "reference", "reference"]
    assert after is backend_option.chosen() is None


def test_a_task_keeps_the_choice_under_which_it_began():
    async def outer():
        async def late():
            await asyncio.sleep(0.01)
            return backend_option.chosen()

        with fa_ops.use_backend("reference"):
            task = asyncio.create_task(late())
        assert backend_option.chosen() is None
        return await task

    assert asyncio.run(outer()) == "reference"


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_blocks_of_generators_end_in_any_order(order):
    def block(name):
        with fa_ops.use_backend(name):
            yield

    names = ["reference", "cpu", "triton"]
    generators = [block(name) for name in names]
    for generator in generators:
        next(generator)
    left = dict(enumerate(names))
    for i in order:
        assert backend_option.chosen() == list(left.values())[-1]
        generators[i].close()
        del left[i]
    assert backend_option.chosen() is None


def test_a_generator_may_end_in_another_thread():
    def block():
        with fa_ops.use_backend("reference"):
            yield

    generator = block()
    next(generator)
    assert backend_option.chosen() == "reference"
    in_thread(generator.close)
    assert backend_option.chosen() is None
    with fa_ops.use_backend("cpu"):
        assert backend_option.chosen() == "cpu"
    assert backend_option.chosen() is None


def test_new_threads_have_the_choice_of_the_process():
    with fa_ops.use_backend("reference"):
        assert in_thread(backend_option.chosen) is None
        assert in_thread(contextvars.copy_context().run, backend_option.chosen) == "reference"


@pytest.fixture
def process_choice(monkeypatch):
    monkeypatch.setattr(backend_option, "default", None)


@pytest.mark.usefixtures("process_choice")
def test_set_backend_holds_for_the_process():
    fa_ops.set_backend("reference")
    assert backend_option.chosen() == in_thread(backend_option.chosen) == "reference"
    assert "backend: reference" in str(fa_ops.explain(*qkv()))
    with fa_ops.use_backend("auto"):
        assert chosen(*qkv()) is dispatch.load("cpu")
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        fa_ops.set_backend("cuda")
    assert backend_option.chosen() == "reference"
    fa_ops.set_backend(None)
    assert backend_option.chosen() is None


def backends_of(monkeypatch) -> list[str]:
    """The backends of the calls that are planned from now on."""
    seen, choose = [], dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda call: seen.append(call.backend) or choose(call))
    return seen


@pytest.mark.usefixtures("process_choice")
def test_compiled_code_follows_the_choice_of_its_context():
    seen = []

    def backend(graph, _):
        (call,) = (node for node in graph.graph.nodes if "attention" in str(node.target))

        def run(*args):
            seen.append(call.kwargs.get("backend"))
            return graph(*args)

        return run

    call = torch.compile(fa_ops.attention, backend=backend, fullgraph=True)
    inputs = qkv()
    call(*inputs)
    with fa_ops.use_backend("reference"):
        call(*inputs)
        in_thread(call, *inputs)
        with fa_ops.use_backend("cpu"):
            call(*inputs)
    call(*inputs)
    fa_ops.set_backend("reference")
    call(*inputs)
    in_thread(call, *inputs)
    fa_ops.set_backend(None)
    call(*inputs)
    assert seen == [None, "reference", None, "cpu", None, "reference", "reference", None]


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
def test_blocks_inside_compiled_code(monkeypatch, breaks):
    def inner(q, k, v):
        out = fa_ops.attention(q, k, v)
        with fa_ops.use_backend("cpu"), fa_ops.use_backend("reference"):
            if breaks:
                torch._dynamo.graph_break()
            out = out + fa_ops.attention(q, k, v)
        return out + fa_ops.attention(q, k, v)

    planned = backends_of(monkeypatch)
    inputs = qkv()
    torch.compile(inner, backend="eager", fullgraph=not breaks)(*inputs)
    assert planned == ["auto", "reference"]  # the third call is like the first
    assert backend_option.chosen() is in_thread(backend_option.chosen) is None


@pytest.mark.parametrize("call", [fa_ops.attention, torch.ops.fa.attention])
def test_backward_runs_on_the_backend_of_its_call_in_any_thread(monkeypatch, call):
    """Autograd has threads of its own for each GPU."""
    q, k, v = qkv(requires_grad=True)
    with fa_ops.use_backend("reference"):
        out = call(q, k, v)
        planned = backends_of(monkeypatch)
        in_thread(out.sum().backward)
    assert planned == ["reference"]
