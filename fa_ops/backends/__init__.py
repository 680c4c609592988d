"""Implementations. No backend imports another (all may import `dropout` and `rotary`, which are
shared), and none knows the dispatcher.

Every backend is a module or package with these functions; `Spec`, `Packing`, `Cache` and
`Gradients` are in `fa_ops.types`:

    available_error() -> str | None
        why it cannot run on this machine at all
    is_for_this_gpu() -> bool
        optional: whether it would run here if all it needs were installed; where it is not, the
        first call that another backend runs instead warns
    support_error(q, k, v, spec) -> str | None
        why it cannot run this call and its gradients, and what can; also called with packed
        (T, H, D) tensors
    forward(q, k, v, spec) -> (out, lse)
    prepare(q, k, v, spec) -> (q, k, v) -> out
        optional: calls like this one again, at the least host cost; None where it cannot
    prepare_with_lse(q, k, v, spec) -> (q, k, v, *tensors) -> (out, lse)
        optional: the same for calls that record a gradient. `tensors` are what `types.tensors_of`
        gives, left out where all are None
    backward(grad_out, grad_lse | None, q, k, v, out, lse, spec, mask_grad=False) -> Gradients
    prepare_backward(q, k, v, spec)
        -> (grad_out, q, k, v, out, lse, *tensors, mask_grad=False) -> Gradients
        optional: the same for the gradients of such calls; without `tensors` any tuple that begins
        with dq, dk and dv
    varlen_forward(q, k, v, packing, spec) -> (out, lse)
    varlen_backward(grad_out, grad_lse | None, q, k, v, out, lse, packing, spec) -> Gradients
    merge_states(outs, lses) -> (out, lse)
        optional
    cache_error(q, k, v, cache, spec) -> str | None
        optional, with the next: why it cannot attend such a key-value cache, and what can
    cache_forward(q, k, v, cache, spec) -> (out, lse)
        writes the new keys and values first, if there are any; q may be empty if there are
    prepare_cached(q, k, v, cache, spec) -> (with_lse, q, k, v, *tensors) -> (out, lse)
        optional: calls like this one again, at the least host cost; None where it cannot. Also for
        dense calls that are decoding (`types.is_decoding`), if `cache_error` has none. `tensors`:
        kv_lens, page_table, key_ranges, alibi_slopes, sinks, key, value, k_scale, v_scale,
        rotary_cos, rotary_sin, unified_max; at the end None may be left out. Without `with_lse` lse
        may be None

What they may rely on: shapes, dtypes and devices were checked by `ops`; no tensor is empty (`ops`
answers zero-sized calls itself); the last dimension of q, k, v, out and grad_out is contiguous,
their other strides and attn_mask's are arbitrary (also 0); every other tensor is contiguous. What a
support_error may look at: `dispatch.select` says, because it remembers the answer.

What they must give: out (B, Hq, Sq, Dv) in q's dtype, laid out (B, Sq, Hq, Dv) in memory; lse fp32
(fp64 for fp64), contiguous (B, Hq, Sq); varlen: out (Tq, Hq, Dv) contiguous, lse (Hq, Tq), rows
outside every sequence 0 and -inf; gradients with the memory layout of `torch.empty_like`;
`Gradients.attn_mask` summed over broadcast dimensions, in the mask's shape and dtype. Never an
alias of an input.
"""
