"""Implementations of attention. No backend imports another.

All may import `dropout`, `mask_blocks`, `quantization`, `rotary` and `selected`.

A backend is a module or package with these functions; `Call` and `Plan` are in `fa_ops.call.call`.
A call's facets (`is_packed`, `is_cached`, ...) say what kind it is:

    available_error() -> str | None
        why it cannot run on this machine at all
    supports(call) -> str | None
        why it cannot run this call, and what can; None where it can. A call's `backend` is "auto"
        or the name that the user asked for: under "auto" a backend may refuse what another one
        runs faster
    plan(call) -> Plan
        how it runs a call that it supports. All thresholds that decide between its kernels are
        here. Of the number of keys of a dense call, or of a contiguous cache, `supports` and
        `plan` may only compare with powers of two, as one plan serves a cache that grows. Nothing
        is compiled before the plan is prepared
    append_error(call) -> str | None
        why it cannot write the new keys of a call over a cache, and rotate its queries, for another
        backend to attend; where it can, `append_plan(call)` is how
    merge_error(outs) -> str | None
        why it cannot merge partial results; where it can, it has `merge_states(outs, lses)`, and
        `merge_into(out, lse, part, part_lse)` if it has a kernel for that
    mask_blocks_error(mask) -> str | None
        why it cannot summarise a mask (B, H, Sq, Sk); where it can, it has `mask_blocks(mask)`

One function is optional: `is_for_this_gpu() -> bool` tells whether the backend would run on this
machine's GPU if all that it needs were installed. Where it is missing, the first call that another
backend runs instead warns.

Backends may rely on the following. Shapes, dtypes and devices have been checked. No tensor is
empty, but for the queries of a call that appends to a cache. The last dimension of query, key,
value, grad_out and out is contiguous; their other strides, and all strides of attn_mask, are
arbitrary (also 0). Every other tensor is contiguous.

They must give the following. out is (B, Hq, Sq, Dv) in query's dtype, laid out (B, Sq, Hq, Dv) in
memory; lse is float32 (float64 for float64), contiguous (B, Hq, Sq). Of packed calls out is
(Tq, Hq, Dv), contiguous, lse is (Hq, Tq), and rows outside every sequence are 0 and -inf. Gradients
have the memory layout of `torch.empty_like`; that of a mask is summed over broadcast dimensions, in
the mask's shape and dtype. No result is an alias of an input.
"""
