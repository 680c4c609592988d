"""Random calls of context_parallel_attention, against the oracle on the whole sequence."""

from __future__ import annotations

import dataclasses
import random

import torch
import torch.distributed as dist
from torch import Tensor

from fa_ops.backends import dropout, reference
from fa_ops.call.call import Call, attention_call
from fa_ops.distributed import balanced_layout, context_parallel_attention, shard, unshard
from fa_ops.ops import dense
from fa_ops.testing.budget import _farthest, _with_rounding, assert_within_budget, naive
from fa_ops.testing.inputs import short_repr

HALF = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class ContextCase:
    """One call. `repr` is a line that recreates it; lengths are of one process."""

    scheme: str = "ring"
    layout: str = "zigzag"  # or "contiguous" or "balanced"
    inner: int = 1  # processes that exchange heads on a mesh of two dimensions
    B: int = 1
    Hq: int = 4
    Hkv: int = 2
    S: int = 16
    Sk: int | None = None  # None: as many keys as queries
    D: int = 8
    Dv: int = 8
    dtype: torch.dtype = torch.float64
    seed: int = 0
    is_causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    scale: float | None = None
    alibi: str | None = None  # "heads" or "batch_heads"
    sinks: bool = False
    kv_lens: bool = False
    key_ranges: tuple[int, int, int] | None = None
    documents: int | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    lse_grad: bool = True
    bshd: bool = False

    def __repr__(self) -> str:
        return short_repr(self)


def random_context_case(seed: int, world: int, inner: int = 2, **fixed) -> ContextCase:
    """A random call for a number of processes, on one group or on a mesh whose second dimension has
    `inner` processes."""
    r = random.Random(seed)
    pick = r.choice

    def maybe(p: float) -> bool:
        return r.random() < p

    inner = pick([1, 1, inner]) if world % inner == 0 and world > inner else 1
    scheme = pick(["ring", "all_gather", "auto"] + ["ulysses"] * (inner == 1))
    divisor = inner if inner > 1 else world if scheme == "ulysses" else 1
    Hkv = pick([1, 2, 3])
    Hq = Hkv * pick([1, 2, 4])
    Hq *= 1 if Hq % divisor == 0 else divisor
    documents = pick([1, 2, 5, 12]) if maybe(0.3) else None
    masked = documents is None
    drops = maybe(0.25)
    fields = {
        "scheme": scheme, "inner": inner, "Hq": Hq, "Hkv": Hkv,
        "layout": pick(["zigzag", "contiguous", "balanced"]),
        "B": pick([1, 2]) if masked else 1,
        "S": pick([2, 6, 16, 34]),
        "D": pick([8, 16]), "Dv": pick([8, 8, 16]),
        "dtype": pick([torch.float64, HALF]),
        "seed": seed,
        "is_causal": maybe(0.6),
        "window": (pick([None, 0, 5, 40]), pick([None, 0, 7])) if maybe(0.3) else None,
        "softcap": 1.5 if maybe(0.2) else 0.0,
        "scale": 0.3 if maybe(0.2) else None,
        "sinks": maybe(0.25),
        "kv_lens": maybe(0.2),
        "documents": documents,
        "dropout_p": 0.3 if drops else 0.0,
        "deterministic": maybe(0.2),
        "lse_grad": maybe(0.5),
        "bshd": maybe(0.3),
    }  # fmt: skip
    if masked and maybe(0.25):
        fields["key_ranges"] = tuple(r.randint(0, 1) for _ in range(3))
    if maybe(0.25) and (masked or not fields["kv_lens"]):
        fields["alibi"] = pick(["heads", "batch_heads"]) if masked else "heads"
    if masked and fields["layout"] != "balanced" and maybe(0.2):
        fields["Sk"] = pick([2, 8, 20])
    return dataclasses.replace(ContextCase(), **(fields | fixed))


def whole_inputs(case: ContextCase, world: int) -> tuple[list[Tensor], dict]:
    """query, key and value of the whole sequence, and the tensors among the options."""
    g = torch.Generator().manual_seed(case.seed)
    S, Sk = case.S * world, (case.Sk or case.S) * world
    shapes = (
        (case.B, case.Hq, S, case.D),
        (case.B, case.Hkv, Sk, case.D),
        (case.B, case.Hkv, Sk, case.Dv),
    )
    tensors = [
        torch.randn(shape, generator=g, dtype=torch.float64).to(case.dtype) for shape in shapes
    ]
    wide = torch.promote_types(case.dtype, torch.float32)
    options: dict = {}
    if case.alibi:
        shape = (case.Hq,) if case.alibi == "heads" else (case.B, case.Hq)
        options["alibi_slopes"] = torch.rand(shape, generator=g) * 0.5
    if case.sinks:
        options["sinks"] = torch.randn(case.Hq, generator=g).to(wide)
    if case.documents is not None:
        inner = torch.randint(0, S + 1, (case.documents - 1,), generator=g).tolist()
        margin = case.seed % 3
        ends = [min(margin, S), *inner, max(S - margin, 0)]
        options["cu_seqlens"] = torch.tensor(sorted(ends), dtype=torch.int32)
    if case.kv_lens:
        count = case.B if case.documents is None else case.documents
        options["kv_lens"] = torch.randint(0, Sk + 1, (count,), generator=g).int()
        if case.documents is not None:
            options["kv_lens"] = options["kv_lens"].minimum(options["cu_seqlens"].diff())
    if case.key_ranges:
        shape = [n if keep else 1 for n, keep in zip((case.B, case.Hq, S), case.key_ranges)]
        ends = torch.randint(0, Sk + 1, (*shape, 2), generator=g).sort(-1).values
        options["key_ranges"] = ends.int()
    return tensors, options


def whole_call(case: ContextCase, q: Tensor, k: Tensor, v: Tensor, operands: dict) -> Call:
    """The call of one process."""
    left, right = (-1 if side is None else side for side in case.window or (None, None))
    ends = operands.pop("cu_seqlens", None)
    return attention_call(
        q, k, v, dropout_p=case.dropout_p, is_causal=case.is_causal, scale=case.scale,
        window_left=left, window_right=right, softcap=case.softcap, cu_seqlens_q=ends,
        cu_seqlens_k=ends, dropout_seed=dropout_seed(case), deterministic=case.deterministic,
        **operands,
    )  # fmt: skip


def dropout_seed(case: ContextCase) -> Tensor | None:
    """The seed that the first process of the group draws."""
    if not case.dropout_p:
        return None
    torch.manual_seed(case.seed)
    return torch.randint(2**63 - 1, (1,))


def loss_weights(case: ContextCase, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of out and lse."""
    g = torch.Generator().manual_seed(case.seed + 1)
    of_out = torch.randn(out.shape, generator=g, dtype=torch.float64)
    of_lse = torch.randn(lse.shape, generator=g, dtype=torch.float64) * case.lse_grad
    return of_out.to(case.dtype), of_lse.to(torch.promote_types(case.dtype, torch.float32))


def one_process(
    case: ContextCase, world: int, attend, dtype: torch.dtype, sign: float = 0.0
) -> dict[str, Tensor]:
    """Results and gradients of the whole sequence in one process.

    A `sign` of 1 or -1 adds the rounding errors of a flash backward's saved tensors, as
    `fa_ops.testing` does for naive attention.
    """
    tensors, operands = whole_inputs(case, world)
    tensors = [x.to(dtype).requires_grad_() for x in tensors]
    leaves = dict(zip("qkv", tensors, strict=True))
    if case.sinks:
        wide = torch.promote_types(dtype, torch.float32)
        operands["sinks"] = leaves["sinks"] = operands["sinks"].to(wide).requires_grad_()
    if case.documents is None:
        out, lse = attend(whole_call(case, *tensors, operands))
    else:
        packed = (x[0].transpose(0, 1) for x in tensors)
        out, lse = reference.varlen(whole_call(case, *packed, operands), attend)
        out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    weights = loss_weights(case, out, lse)
    if sign:
        weights = _with_rounding(*weights, out, lse, sign)
    return with_gradients(case, out, lse, leaves, weights)


def with_gradients(case, out, lse, leaves: dict, weights) -> dict[str, Tensor]:
    """The results with the gradients of the leaves."""
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    loss = (out * weights[0].to(out.dtype)).sum()
    if case.lse_grad:
        loss = loss + (finite * weights[1].to(lse.dtype)).sum()
    grads = torch.autograd.grad(
        loss, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    names = (f"grad of {name}" for name in leaves)
    return {"out": out, "lse": lse} | dict(zip(names, grads, strict=True))


def distributed(case: ContextCase, mesh_or_group, world: int) -> dict[str, Tensor]:
    """The same by all processes, gathered."""
    tensors, options = whole_inputs(case, world)
    tokens = tensors[0].shape[2]
    layout = case.layout
    if layout == "balanced":
        masks = {n: x for n, x in options.items() if n in ("kv_lens", "key_ranges", "cu_seqlens")}
        layout = balanced_layout(
            tokens, mesh_or_group, is_causal=case.is_causal, window=case.window, **masks
        )
    parts = [shard(x, mesh_or_group, layout=layout) for x in tensors]
    if case.bshd:
        parts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    parts = [x.requires_grad_() for x in parts]
    leaves = dict(zip("qkv", parts, strict=True))
    if case.sinks:
        options["sinks"] = leaves["sinks"] = options["sinks"].requires_grad_()
    torch.manual_seed(case.seed)
    out, lse = context_parallel_attention(
        *parts, mesh_or_group, case.scheme, is_causal=case.is_causal, window=case.window,
        softcap=case.softcap, scale=case.scale, dropout_p=case.dropout_p, layout=layout,
        deterministic=case.deterministic, return_lse=True, **options,
    )  # fmt: skip
    assert out.dtype == case.dtype and lse.dtype == torch.promote_types(case.dtype, torch.float32)
    shape = (case.B, case.Hq, tokens)
    weights = loss_weights(case, torch.empty(*shape, case.Dv), torch.empty(shape))
    weights = [shard(x, mesh_or_group, layout=layout) for x in weights]
    found = with_gradients(case, out, lse, leaves, weights)
    if case.sinks:
        dist.all_reduce(found["grad of sinks"])
        found["grad of sinks"] /= dist.get_world_size() / world
    return {
        name: x if name == "grad of sinks" else unshard(x, mesh_or_group, layout=layout)
        for name, x in found.items()
    }


def assert_case_right(case: ContextCase, mesh_or_group, world: int) -> None:
    """Compare the results of all processes with the oracle; those of 16 bits within the budget."""
    found = distributed(case, mesh_or_group, world)
    exact = one_process(case, world, reference.dense, torch.float64)
    if case.dtype == torch.float64:
        for name, x in found.items():
            difference = (x - exact[name]).abs().nan_to_num(0.0)
            same = torch.equal(x.isfinite(), exact[name].isfinite())
            assert same and difference.max() < 1e-10, f"{case}: {name} differs: {difference.max()}"
        return
    baselines = [one_process(case, world, naive, case.dtype, sign) for sign in (1.0, -1.0)]
    baselines.append(one_process(case, world, one_call, case.dtype))
    for name, x in found.items():
        others = [baseline[name].to(x.dtype) for baseline in baselines]
        baseline = _farthest(exact[name], *others)
        noise = sinks_noise(case, exact, world) if name == "grad of sinks" else None
        assert_within_budget(f"{case}: {name}", x, exact[name], baseline, noise)


def sinks_noise(case: ContextCase, exact: dict[str, Tensor], world: int) -> Tensor:
    """The typical error of sinks' gradient, a sum over rows of products with a rounded out."""
    out, lse = exact["out"], exact["lse"]
    products = loss_weights(case, out, lse)[0].double() * out
    sinks = whole_inputs(case, world)[1]["sinks"].double().view(1, -1, 1)
    weight = torch.exp(sinks - lse).masked_fill(lse == float("-inf"), 0.0)
    rounding = torch.finfo(case.dtype).eps / 2
    if case.scheme != "ulysses":  # out is merged from results that have been rounded too
        rounding *= 2**0.5
    return (rounding * weight * products.norm(dim=-1)).square().sum((0, 2)).sqrt()


def one_call(call: Call, first_batch: int = 0) -> tuple[Tensor, Tensor]:
    """The operator itself, as a baseline."""
    if call.options.dropout_p:
        words = dropout.words_of(call.operands.dropout_seed, *call.query.shape[:3], first_batch)
        call = call.changed(dropout_seed=words)
    return dense.OPERATORS.forward.run(call)
