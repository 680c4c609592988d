"""Packed queries over keys in pages: the forward kernel, whose tiles look up their sequences."""

from __future__ import annotations

from torch import Tensor

from fa_ops.backends.hopper import dense_forward, prefill
from fa_ops.backends.hopper.problem import MISALIGNED, one_batch, tma_aligned
from fa_ops.call import Call, PagedTensors, Run
from fa_ops.types import DenseTensors


def support_error(call: Call) -> str | None:
    """Why the kernel cannot run the call, or None."""
    query, keys = call.query.dtype, call.key.dtype
    if keys != query:
        return f"attends packed queries over pages of their own dtype, got {query} and {keys}"
    return prefill.cache_error(one_batch(call.query), call.key, call.value, call.cache, call.spec)


def prepare(call: Call) -> Run:
    """A function that runs calls with the geometry of this one."""
    options, sequences = call.without_tensors(), call.cache.page_table.shape[0]
    plan = _plan(call, sequences)

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: PagedTensors, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        used, t = plan, tensors
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & MISALIGNED:
            q, k, v = map(tma_aligned, (q, k, v))
            again = options.with_tensors(t)._replace(query=q, key=k, value=v)
            used = _plan(again, sequences)
        small = DenseTensors(None, t.alibi_slopes, t.sinks, t.kv_lens)
        small = dense_forward.as_kernel_inputs(small)
        cu_seqlens = t.cu_seqlens_q.data_ptr(), 0
        return used.run(q, k, v, with_lse, small, None, t.page_table, cu_seqlens)

    return run


def _plan(call: Call, sequences: int) -> dense_forward.ForwardPlan:
    spec = call.spec.with_tensors(dense_forward.as_kernel_inputs(call.spec.tensors))
    pages = call.key.transpose(1, 2), call.value.transpose(1, 2)
    return dense_forward.plan_of(
        one_batch(call.query), *pages, spec, table=call.cache.page_table, sequences=sequences
    )
