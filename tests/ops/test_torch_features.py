"""What the operators tell the rest of torch: checkpointing, FLOPs, NestedTensor, export, traces."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
from torch.export import Dim
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fa_ops
from fa_ops.ops import dense, varlen
from tests.ops.cases import CASES, dense_call, packed_call, packed_case


def gradients(function, inputs):
    return torch.autograd.grad(function(*inputs).sin().sum(), inputs)


# Activation checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["causal", "dropout"])
def test_checkpoint(name, reentrant):
    (q, k, v, *_), _ = dense_call(CASES[name], requires_grad=True)

    def block(q, k, v):
        return fa_ops.attention(q.sin(), k, v, dropout_p=CASES[name].dropout_p)

    torch.manual_seed(0)
    expected = gradients(block, (q, k, v))
    torch.manual_seed(0)
    out = checkpoint(block, q, k, v, use_reentrant=reentrant)
    out.sin().sum().backward()
    for x, grad in zip((q, k, v), expected):
        torch.testing.assert_close(x.grad, grad)


class Counting:
    """Counts a backend's forward calls."""

    def __init__(self, monkeypatch) -> None:
        self.calls = 0
        cpu = fa_ops.plans.dispatch.load("cpu")
        plan_of = cpu.plan

        def plan(call):
            real = plan_of(call)
            return real if call.is_backward else real._replace(prepare=self.counted(real.prepare))

        monkeypatch.setattr(cpu, "plan", plan)

    def counted(self, prepare):
        def prepared(call):
            run = prepare(call)

            def counted(*args):
                self.calls += 1
                return run(*args)

            return counted

        return prepared


@pytest.mark.parametrize("saved, calls", [(True, 1), (False, 2)])
@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpointing(monkeypatch, saved, calls, compiled):
    counter = Counting(monkeypatch)
    (q, k, v, *_), _ = dense_call(CASES["causal"], requires_grad=True)
    policy = list(fa_ops.SAC_OPS) if saved else [torch.ops.aten.mm.default]
    contexts = partial(create_selective_checkpoint_contexts, policy)

    def block(q, k, v):
        return fa_ops.attention(q.sin(), k, v).cos()

    def function(q, k, v):
        return checkpoint(block, q, k, v, use_reentrant=False, context_fn=contexts)

    if compiled:
        function = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)
    grads = gradients(function, (q, k, v))
    assert counter.calls == calls
    torch.testing.assert_close(grads, gradients(block, (q, k, v)))


def test_saved_tensor_hooks_see_everything_that_is_kept():
    """All saved tensors go through the hooks, so that offloading them frees the memory."""
    packed = []
    args, options = dense_call(CASES["positions"], requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        dense.WITH_LSE(*args, **options)
    given = [t for t in (*args, *options.values()) if torch.is_tensor(t)]
    pointers = {t.data_ptr() for t in packed}
    assert {t.data_ptr() for t in given} <= pointers and len(pointers) == len(given) + 2


# FLOPs


def count(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["plain", "causal", "positions"])
def test_flops(name):
    case = CASES[name]
    args, options = dense_call(case, requires_grad=True)
    pairs = case.B * case.Hq * case.Sq * case.Sk
    forward = 2 * pairs * (case.D + case.Dv)
    backward = 2 * pairs * (3 * case.D + 2 * case.Dv)
    assert count(lambda: dense.ATTENTION(*args, **options)) == forward
    both = count(lambda: dense.WITH_LSE(*args, **options)[0].sum().backward())
    assert both == forward + backward


def test_flops_are_torchs():
    """The same convention as torch's own attention on a GPU: meta tensors know."""
    q, k, v = (torch.randn(2, 4, 32, 16, device="meta", requires_grad=True) for _ in range(3))
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default

    def theirs():
        flash(q, k, v, 0.0, True)

    assert count(lambda: fa_ops.attention(q, k, v, is_causal=True)) == count(theirs)


def test_flops_of_varlen_count_the_sequences():
    H, D = 4, 8
    q = torch.randn(10, H, D, requires_grad=True)
    ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    pairs = H * (3 * 3 + 7 * 7)
    call = lambda e: fa_ops.attention_varlen(q, q, q, e, e)  # noqa: E731
    assert count(lambda: call(ends)) == 2 * pairs * 2 * D
    assert count(lambda: call(ends).sum().backward()) == 2 * pairs * 7 * D
    q = torch.randn(10, H, D, device="meta")
    assert count(lambda: call(ends.to("meta"))) == 2 * H * 2 * 10 * 10 * 2 * D  # a bound


# The profiler, meta tensors, inference mode


def test_profiler_shows_the_operators():
    args, options = dense_call(CASES["plain"], requires_grad=True)
    with torch.profiler.profile() as profile:
        dense.ATTENTION(*args, **options).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"fa::attention", "fa::attention_backward"} <= names


@pytest.mark.parametrize("name", CASES)
def test_meta(name):
    args, options = dense_call(CASES[name])
    move = lambda x: x.to("meta") if torch.is_tensor(x) else x  # noqa: E731
    on_meta = dense.WITH_LSE(*map(move, args), **{n: move(x) for n, x in options.items()})
    for fake, real in zip(on_meta, dense.WITH_LSE(*args, **options)):
        assert fake.device.type == "meta"
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("name", CASES)
def test_inference_mode(name):
    args, options = dense_call(CASES[name])
    with torch.inference_mode():
        out = dense.ATTENTION(*args, **options)
        assert out.is_inference()
    torch.testing.assert_close(out, dense.ATTENTION(*args, **options))
    if packed_case(name):
        args, options = packed_call(CASES[name])
        expected = varlen.VARLEN(*args, **options)
        with torch.inference_mode():
            torch.testing.assert_close(varlen.VARLEN(*args, **options), expected)


def test_lse_alone_may_carry_the_gradient():
    q, k, v = (t.double().requires_grad_() for t in dense_call(CASES["plain"])[0][:3])
    lse = fa_ops.attention(q, k, v, return_lse=True)[1]
    got = torch.autograd.grad(lse.sin().sum(), (q, k))
    scores = q @ k.repeat_interleave(2, 1).mT / q.shape[-1] ** 0.5
    expected = torch.autograd.grad(torch.logsumexp(scores, -1).sin().sum(), (q, k))
    torch.testing.assert_close(got, expected)


def test_gradcheck():
    (q, k, v, *_), _ = dense_call(CASES["plain"])
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(1, 5, 1, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, mask, sinks):
        return fa_ops.attention(q, k, v, mask, is_causal=True, sinks=sinks, return_lse=True)

    assert torch.autograd.gradcheck(function, (q, k, v, mask, sinks))


# Jagged NestedTensors are packed sequences.

LENGTHS = (3, 5, 2)


def nested(*heads: int, D: int = 8) -> list[torch.Tensor]:
    """(B, H, lengths, D) per head count, all of one ragged structure."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    make = torch.nested.nested_tensor_from_jagged
    return [make(torch.randn(sum(LENGTHS), H, D), ends).transpose(1, 2) for H in heads]


def function(q, k, v, sinks):
    return fa_ops.attention(q, k, v, is_causal=True, sinks=sinks, return_lse=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_nested(compiled):
    q, k, v = (t.detach().requires_grad_() for t in nested(4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    out, lse = run(q, k, v, sinks)
    assert out.is_nested and out.shape[:2] == (3, 4) and out.shape[3] == 8
    (out.values().sin().sum() + lse.values().cos().sum()).backward()
    for b, _ in enumerate(LENGTHS):
        alone = [t.detach().unbind()[b][None].requires_grad_() for t in (q, k, v)]
        one_out, one_lse = function(*alone, sinks.detach())
        torch.testing.assert_close(out.unbind()[b][None], one_out)
        torch.testing.assert_close(lse.unbind()[b][None], one_lse)
        (one_out.sin().sum() + one_lse.cos().sum()).backward()
        for t, one in zip((q, k, v), alone):
            torch.testing.assert_close(t.grad.unbind()[b][None], one.grad)
    assert sinks.grad.abs().sum() > 0


def test_without_lse_and_without_gradients():
    q, k, v = nested(2, 2, 2)
    with torch.no_grad():
        out = fa_ops.attention(q, k, v)
    torch.testing.assert_close(
        out.unbind()[1][None], fa_ops.attention(*(t.unbind()[1][None] for t in (q, k, v)))
    )


def test_errors_name_the_argument():
    q, k, v = nested(2, 2, 2)
    with pytest.raises(NotImplementedError, match="attn_mask does not go with NestedTensors"):
        fa_ops.attention(q, k, v, torch.zeros(1))
    with pytest.raises(ValueError, match="key must be a jagged NestedTensor"):
        fa_ops.attention(q, k.values()[None], v)
    with pytest.raises(ValueError, match="query must be a jagged NestedTensor"):
        fa_ops.attention(q.transpose(1, 2), k, v)
    message = "must not be a NestedTensor: 8-bit products attend dense tensors"
    with torch.no_grad(), pytest.raises(ValueError, match=f"query {message}"):
        fa_ops.quantized_attention(q, k, v)
    with torch.no_grad(), pytest.raises(ValueError, match=f"value {message}"):
        fa_ops.quantized_attention(q.values()[None], k.values()[None], v)


def test_keys_and_values_have_the_same_lengths():
    q, k, _ = nested(2, 2, 2)
    ends = torch.tensor([0, 5, 8, 10])
    values = torch.randn(10, 2, 8)
    other = torch.nested.nested_tensor_from_jagged(values, ends).transpose(1, 2)
    message = r"value must have the lengths of key, \[3, 5, 2\], got \[5, 3, 2\]"
    for tensors in ((q, k, other), (q.detach().requires_grad_(), k, other)):
        with pytest.raises(ValueError, match=message):
            fa_ops.attention(*tensors)
    same = torch.nested.nested_tensor_from_jagged(values, k.offsets().clone()).transpose(1, 2)
    assert fa_ops.attention(q, k, same).is_nested


# torch.export with dynamic lengths, saved and loaded.


class Dense(torch.nn.Module):
    def forward(self, q, k, v, lens):
        out, lse = fa_ops.attention(q, k, v, is_causal=True, kv_lens=lens, return_lse=True)
        return out.transpose(1, 2).flatten(2), lse


class Packed(torch.nn.Module):
    def forward(self, q, k, v, ends):
        return fa_ops.attention_varlen(q, k, v, ends, ends, window=(4, 0))


def dense_inputs(S: int):
    q, k, v = torch.randn(2, 4, S, 8), torch.randn(2, 2, S, 8), torch.randn(2, 2, S, 8)
    return q, k, v, torch.tensor([S, S - 1], dtype=torch.int32)


def packed_inputs(T: int):
    ends = torch.tensor([0, T // 2, T], dtype=torch.int32)
    return torch.randn(T, 4, 8), torch.randn(T, 2, 8), torch.randn(T, 2, 8), ends


@pytest.mark.parametrize(
    "model, inputs, shapes",
    [
        (Dense(), dense_inputs, ({2: Dim("S")}, {2: Dim("S")}, {2: Dim("S")}, None)),
        (Packed(), packed_inputs, ({0: Dim("T")}, {0: Dim("T")}, {0: Dim("T")}, None)),
    ],
    ids=["dense", "packed"],
)
def test_export_save_load(model, inputs, shapes):
    program = torch.export.export(model, inputs(9), dynamic_shapes=shapes)
    targets = [str(n.target) for n in program.graph.nodes if "fa." in str(n.target)]
    assert len(targets) == 1, targets
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for S in (9, 5, 16):
        given = inputs(S)
        torch.testing.assert_close(loaded(*given), model(*given))


# torch.fx.symbolic_trace records every public function as its operator; torch.jit too.

ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)
LENS = torch.tensor([3, 0], dtype=torch.int32)
Q, K, V = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
TOKENS = [x[0].transpose(0, 1) for x in (Q, K, V)]
STEP, NEW = Q[:, :, :1], K[:, :, :1]
CALLS = {
    "attention": (lambda q, k, v: fa_ops.attention(q, k, v, is_causal=True), (Q, K, V)),
    "lse": (lambda q, k, v, lens: fa_ops.attention(q, k, v, kv_lens=lens, return_lse=True),
            (Q, K, V, LENS)),
    "mask": (lambda q, k, v, mask: fa_ops.attention(q, k, v, mask, window=(3, 2), scale=0.5,
                                                    mask_blocks=fa_ops.mask_blocks(mask)),
             (Q, K, V, torch.rand(9, 9) > 0.3)),
    "varlen": (lambda q, k, v, ends: fa_ops.attention_varlen(q, k, v, ends, ends, is_causal=True),
               (*TOKENS, ENDS)),
    "varlen, lse": (lambda q, k, v, ends: fa_ops.attention_varlen(q, k, v, ends, ends, 5,
                                                                  return_lse=True),
                    (*TOKENS, ENDS)),
    "cache": (lambda q, k, v, lens: fa_ops.attention_with_kv_cache(q, k, v, lens, softcap=2.0),
              (STEP, K, V, LENS)),
    "append": (lambda q, k, v, lens, new: fa_ops.attention_with_kv_cache(q, k, v, lens, key=new,
                                                                         value=new),
               (STEP, K, V, LENS, NEW)),
    "quantized": (lambda q, k, v: fa_ops.quantized_attention(q, k, v, rotate=True), (Q, K, V)),
    "merge": (lambda outs, lses: fa_ops.merge_states(outs, lses)[0], (Q, Q[..., 0])),
    "merge two": (lambda a, b, s, t: fa_ops.merge_states((a, b), (s, t)),
                  (Q, Q + 1, Q[..., 0], Q[..., 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_traced_functions_give_the_results_of_eager_ones(name):
    function, tensors = CALLS[name]
    traced = torch.fx.symbolic_trace(function)
    assert any("fa." in str(node.target) for node in traced.graph.nodes)
    results = [f(*(t.clone() for t in tensors)) for f in (function, traced)]
    torch.testing.assert_close(*(r if type(r) is tuple else (r,) for r in results), rtol=0, atol=0)


def test_modules_are_traced_with_their_parameters():
    class Attend(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.randn(4))

        def forward(self, q, k, v):
            return fa_ops.attention(q, k, v, sinks=self.sinks)

    module = Attend()
    traced = torch.fx.symbolic_trace(module)
    assert torch.equal(traced(Q, K, V), module(Q, K, V))
    traced(Q, K, V).sum().backward()
    assert module.sinks.grad.abs().sum() > 0


def test_every_call_of_a_traced_function_drops_other_weights():
    traced = torch.fx.symbolic_trace(lambda q, k, v: fa_ops.attention(q, k, v, dropout_p=0.5))
    first, second = traced(Q, K, V), traced(Q, K, V)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    again = traced(Q, K, V)
    torch.manual_seed(3)
    assert torch.equal(traced(Q, K, V), again)


def test_pages_are_refused_by_name():
    pages, table = torch.zeros(4, 8, 2, 8), torch.arange(4, dtype=torch.int32).view(2, 2)

    def paged(q):
        return fa_ops.attention_varlen(q, pages, pages, ENDS, None, kv_lens=LENS, page_table=table)

    with pytest.raises(NotImplementedError, match="query must be a Tensor with page_table, got"):
        torch.fx.symbolic_trace(paged)


def test_what_is_no_tensor_is_still_refused():
    for wrong in ([1.0], 1.0, None, Q.numpy(), torch.Tensor):
        with pytest.raises(TypeError, match="query must be a Tensor, got"):
            fa_ops.attention(wrong, K, V)


def test_operators_are_scripted():
    @torch.jit.script
    def scripted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        return torch.ops.fa.attention(q, k, v, None, 0.0, True)

    assert torch.equal(scripted(Q, K, V), fa_ops.attention(Q, K, V, is_causal=True))
