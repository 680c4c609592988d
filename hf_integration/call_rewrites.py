"""Rewrites of a layer's call into one that an operator of fa_ops can compute.

A rewrite is a function of the layer and its call that returns a changed call, or the same object if
there is nothing to change. For calls whose decisions are remembered, whether it changes the call
must depend only on the family of the call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from fa_ops.call.options import MAX_HEAD_DIM, MAX_SELECTED_GRADIENT_DIM
from hf_integration import encodings, key_ranges
from hf_integration.encodings import MaskArguments, PackingHint, PerTensorCache, is_readable
from hf_integration.operators import Documents, LayerCall, any_requires_grad, head_dim, is_step

Rewrite = Callable[[nn.Module, LayerCall], LayerCall]


def without_hidden_keys(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Slice off the keys behind the last one that any query attends."""
    visible = call.mask.visible_keys
    if visible is None or visible == call.key.shape[2]:
        return call
    return call._replace(key=call.key[:, :, :visible], value=call.value[:, :, :visible])


def without_latents(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Expand latents to the keys and values of every head, or absorb the projections.

    Absorbed calls have wide heads, which on GPUs only the decoding kernel supports.
    """
    query, key, value = call[:3]
    if not is_latent(layer, query, key):
        return call
    scale, extras = call.options["scale"], call.extras
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    call = call._replace(options=call.options | {"scale": scale})
    if extras.indices is not None:  # then a query attends few latents, whatever the cache
        lists = extras.indices if extras.indices.dim() == 4 else extras.indices.unsqueeze(1)
        may_absorb = lists.shape[1] == 1 and has_plain_projection(layer) and may_list(call, lists)
    else:
        may_absorb = extras.cu_seqlens[0] is None and not extras.output_attentions
        may_absorb = may_absorb and can_absorb(layer, query, key)
        may_absorb = may_absorb and (key.device.type == "cpu" or is_step(call))
    if may_absorb:
        query, key, value, up_v = absorb_latents(layer, query, key, value)
        return call._replace(query=query, key=key, value=value, up_v=up_v)
    key, value = expand_latents(layer, key, value)
    return call._replace(key=key, value=value)


def with_uniform_tensors(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Give query, key and value one dtype, one batch size and a contiguous last dimension."""
    query, key, value = call[:3]
    if not query.dtype == key.dtype == value.dtype:
        device = query.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else value.dtype
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.shape[0] != key.shape[0]:  # learned queries, shared by the batch
        query = query.expand(key.shape[0], -1, -1, -1)
    if not (query.stride(-1) == key.stride(-1) == value.stride(-1) == 1):
        tensors = (query, key, value)
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in tensors)
    if query is call.query and key is call.key and value is call.value:
        return call
    return call._replace(query=query, key=key, value=value)


def with_selected_keys(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Attend only the keys that lists name; what the lists' operators lack, a dense mask does.

    Lists are of keys, `indices` (B, Sq, n) or (B, H, Sq, n), or of blocks, (B, Hkv, Sq, n); -1
    lists none.
    """
    indices, blocks = call.extras.indices, call.extras.block_indices
    if indices is None and blocks is None:
        return call
    size = 1 if blocks is None else layer.indexer.block_size
    lists = indices if blocks is None else blocks
    lists = lists.unsqueeze(1) if lists.dim() == 3 else lists
    lists = lists.masked_fill(lists * size >= call.key.shape[2], -1).int()
    mask = call.mask
    if not may_list(call, lists):
        return call._replace(mask=_masked_by(lists, size, call))
    if mask.attn_mask is not None:
        lists = _kept_tokens(lists, mask.attn_mask)
    if mask.kv_lens is not None:
        mask = mask.without_lens()
    if call.query.is_cuda and blocks is None:  # where tokens listed twice would count twice
        lists = _tokens_in_ranges(_once(lists), mask, call)
    mask = MaskArguments(is_causal=mask.is_causal, key_ranges=mask.key_ranges)
    return call._replace(lists=lists, block_size=size, mask=mask)


def may_list(call: LayerCall, lists: Tensor) -> bool:
    """Whether the operators that attend lists (B, H, Sq, n) have all that a call asks for."""
    extras, options, mask = call.extras, call.options, call.mask
    if options["dropout_p"] or options["softcap"] or extras.output_attentions:
        return False
    if extras.position_bias is not None or (call.sinks is not None and call.sinks.dim() != 1):
        return False
    if mask.key_ranges is not None and mask.key_ranges.shape[1] != 1:
        return False
    heads, is_blocks = lists.shape[1], extras.block_indices is not None
    if mask.attn_mask is not None:
        is_simple = mask.attn_mask.dtype == torch.bool and mask.attn_mask.dim() == 4
        if is_blocks or not is_simple or mask.attn_mask.shape[1] != 1:
            return False
    if call.query.is_cuda:  # whose kernels for lists of tokens, of all heads, have no gradients
        recorded = torch.is_grad_enabled() and any_requires_grad(*call[:3], call.sinks)
        if not is_blocks:
            return heads == 1 and not recorded
        if head_dim(call) > (MAX_SELECTED_GRADIENT_DIM if recorded else MAX_HEAD_DIM):
            return False
    return heads in (1, call.key.shape[1])


def _kept_tokens(tokens: Tensor, mask: Tensor) -> Tensor:
    """Lists of tokens (B, H, Sq, n) without those that a bool mask hides."""
    B, H, Sq, _ = tokens.shape
    at = tokens.clamp(min=0).long()
    return tokens.masked_fill(~mask.expand(B, H, Sq, -1).gather(3, at), -1)


def _once(tokens: Tensor) -> Tensor:
    """Lists of tokens, ascending, in which none is repeated."""
    tokens = tokens.sort(-1).values
    is_repeated = torch.zeros_like(tokens, dtype=torch.bool)
    is_repeated[..., 1:] = tokens[..., 1:] == tokens[..., :-1]
    return tokens.masked_fill(is_repeated, -1)


def _tokens_in_ranges(tokens: Tensor, mask: MaskArguments, call: LayerCall) -> Tensor:
    """Lists of tokens without those that causality or ranges hide, which an operator does not."""
    Sq, Sk = call.query.shape[2], call.key.shape[2]
    if mask.is_causal:
        last = torch.arange(Sk - Sq, Sk, device=tokens.device)[:, None]
        tokens = tokens.masked_fill(tokens > last, -1)
    if mask.key_ranges is not None:
        low, high = mask.key_ranges[..., :1], mask.key_ranges[..., 1:]
        tokens = tokens.masked_fill((tokens < low) | (tokens >= high), -1)
    return tokens


def _masked_by(lists: Tensor, size: int, call: LayerCall) -> MaskArguments:
    """The mask of a call with all keys masked out that lists (B, H, Sq, n) do not name."""
    mask, Sk = call.mask, call.key.shape[2]
    kept = encodings.listed_keys(lists, -(-Sk // size)).repeat_interleave(size, -1)[..., :Sk]
    if kept.shape[1] != 1:
        kept = kept.repeat_interleave(call.query.shape[1] // kept.shape[1], 1)
    kept = kept & mask.keep(call.query.shape[2], Sk, call.key.device)
    if mask.attn_mask is not None and mask.attn_mask.dtype != torch.bool:
        kept = mask.attn_mask.masked_fill(~kept, float("-inf"))
    return MaskArguments(attn_mask=kept)


def with_documents(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Separate documents that are packed into the only row of a batch.

    cu_seqlens or else positions describe the documents. If nothing else is masked, the call becomes
    a packed one; otherwise the documents become part of the mask. cu_seqlens may also be those of
    all tokens of several rows, as in transformers' FlashAttention path.
    """
    mask, extras, Sq = call.mask, call.extras, call.query.shape[2]
    q_ends, k_ends, *longest = extras.cu_seqlens
    B, Sk = call.query.shape[0], call.key.shape[2]
    if extras.is_user_mask or (B != 1 and (q_ends is None or mask.kv_lens is not None)):
        return call
    if q_ends is not None:
        k_ends = q_ends if k_ends is None else k_ends
        longest = (longest_document(x, layer) for x in longest)
        documents = Documents(q_ends.int(), k_ends.int(), *longest)
    else:
        positions = extras.position_ids
        if mask.packing is PackingHint.NONE or positions is None or Sq == 1:
            return call
        if tuple(positions.shape) != (1, Sq):
            return call
        if not is_readable(positions):
            return call._replace(mask=within_positions(mask, positions, (Sq, Sk)))
        if Sk != Sq:  # earlier keys
            return call
        if hides_tokens(mask):
            if not may_restart(positions, layer):
                return call
            return call._replace(mask=within_positions(mask, positions, (Sq, Sk), True))
        documents = packed_documents(positions, layer, mask.packing is PackingHint.ONLY)
        if documents is None:
            return call
    is_plain = mask.attn_mask is extras.position_bias is None and not extras.output_attentions
    if is_plain and (mask.key_ranges is None or mask.packing is PackingHint.ONLY):
        return call._replace(documents=documents)
    return call._replace(mask=within_documents(mask, documents, (B, Sq, Sk)))


def with_bias(layer: nn.Module, call: LayerCall) -> LayerCall:
    """Add the position bias to the mask, whose dtype becomes one that the operators accept."""
    added, bias = call.mask.attn_mask, call.extras.position_bias
    if bias is not None:
        bias = bias[..., : call.key.shape[2]]
        if added is None:
            added = bias
        elif added.dtype == torch.bool:
            added = bias.masked_fill(~added, float("-inf"))
        else:
            added = bias + added
    if added is not None and added.dtype not in (torch.bool, call.query.dtype):
        added = added.float()
    if added is call.mask.attn_mask:
        return call
    return call._replace(mask=call.mask._replace(attn_mask=added, mask_blocks=None))


REWRITES = (
    without_hidden_keys, without_latents, with_uniform_tensors, with_selected_keys, with_documents,
    with_bias,
)  # fmt: skip


# Documents packed into one row, separated by position_ids.
#
# transformers' mask functions consider positions only if there is neither an attention mask nor a
# cache, and by default there is a cache. Its FlashAttention path always does for a single row, and
# so does this module: in causal self-attention over one row without earlier keys, a document begins
# at every token with the smallest position of the kept ones, in every mode. Gaps, repeats and
# padding begin none.


# One cache for each value, as several may be derived from one tensor.
_documents_cache, _gaps_cache, _falling_cache = PerTensorCache(), PerTensorCache(), PerTensorCache()


def packed_documents(
    position_ids: Tensor, layer: nn.Module, at_gaps: bool = False
) -> Documents | None:
    """The documents of one row of positions (1, S), or None if there is only one document.

    With `at_gaps` they are those of transformers' masks, which separate also at gaps and repeats.
    Reads the device once in a forward pass.
    """
    cache = _gaps_cache if at_gaps else _documents_cache
    return cache.get(position_ids, layer, lambda: _find_documents(position_ids[0], at_gaps))


def may_restart(position_ids: Tensor, layer: nn.Module) -> bool:
    """Whether any position is not above the one before it; reads the device as `documents`."""
    return _falling_cache.get(position_ids, layer, lambda: bool((position_ids.diff() <= 0).any()))


def _find_documents(positions: Tensor, at_gaps: bool) -> Documents | None:
    if at_gaps:
        starts = ((positions.diff() != 1).nonzero()[:, 0] + 1).tolist()
    else:
        starts = (_begins_document(positions, None).nonzero()[:, 0]).tolist()
    if not starts:
        return None
    ends = [0, *starts, positions.shape[0]]
    longest = max(b - a for a, b in zip(ends, ends[1:], strict=False))
    on_device = torch.tensor(ends, dtype=torch.int32, device=positions.device)
    return Documents(on_device, on_device, longest, longest)


def _begins_document(positions: Tensor, kept: Tensor | None) -> Tensor:
    """Bool (S,), True where a document begins after another.

    `kept` (S,) is False for padding, at which positions are arbitrary, and which begins none. If
    padding precedes the first kept token of a document, positions may count it or not. They do if
    they rise by ones from the smallest to that token's, which is no continuation of an only token.
    """
    i = torch.arange(positions.shape[0], device=positions.device)
    if kept is None:
        return (positions == positions.min()) & (i > 0)
    last = torch.where(kept, i, -1).cummax(0).values
    before = torch.cat([torch.full_like(last[:1], -1), last[:-1]])
    smallest = torch.where(kept, positions, positions.max()).min()
    first = i - (positions - smallest)  # the token with the smallest position, if they count
    rises = torch.cat([torch.zeros_like(kept[:1]), positions.diff() == 1])
    counted = (first > before) & (torch.where(rises, 0, i).cummax(0).values <= first)
    continues = (first == i - 1) & (positions[before.clamp(min=0)] == smallest)
    return kept & (before >= 0) & counted & ~continues


def longest_document(longest: int | Tensor | None, layer: nn.Module) -> int | None:
    """The longest document, of which some callers give a tensor.

    The host reads it once in a forward pass; None where it cannot, which leaves it unknown.
    """
    if not isinstance(longest, Tensor):
        return longest
    return _documents_cache.get(longest, layer, longest.item) if is_readable(longest) else None


def within_documents(
    mask: MaskArguments, documents: Documents, shape: tuple[int, int, int]
) -> MaskArguments:
    """The mask with every query restricted to the keys of its own document in its row.

    `shape` is (B, Sq, Sk); the documents are those of the tokens of all rows.
    """
    (q_ends, k_ends, *_), (B, Sq, Sk) = documents, shape
    i = torch.arange(B * Sq, device=q_ends.device, dtype=torch.int32).view(B, Sq)
    document = torch.searchsorted(q_ends, i, right=True).clamp(1, q_ends.shape[0] - 1)
    before = torch.arange(B, device=q_ends.device, dtype=torch.int32)[:, None] * Sk
    lo, hi = k_ends[document - 1] - before, k_ends[document] - before
    return _restricted(mask, lo.clamp(0, Sk), hi.clamp(0, Sk))


def within_positions(
    mask: MaskArguments, position_ids: Tensor, shape: tuple[int, int], is_whole: bool = False
) -> MaskArguments:
    """The same for positions (1, S) that the host may not read, and a causal mask.

    `shape` is (Sq, Sk). A document begins as many keys before a query's own key as queries. That is
    the key of its number if the keys `is_whole` are the tokens, and else the last one it attends.
    """
    (Sq, Sk), device = shape, position_ids.device
    i, ranges = torch.arange(Sq, device=device), mask.key_ranges
    end = i + (Sk - Sq + 1) if is_whole or ranges is None else ranges[0, 0, :, 1]
    begins = _begins_document(position_ids[0], _kept(mask, end))
    document = (begins & (end[0] <= 1)).cumsum(0)  # one document if there are earlier keys
    first, after = key_ranges.equal_range(document, document)
    lo = torch.where(first > 0, end - (i + 1 - first), 0)
    if ranges is None:
        return _restricted(mask._replace(is_causal=False), lo, end)
    return _restricted(mask, lo, end + (after - i - 1))


def hides_tokens(mask: MaskArguments) -> bool:
    """Whether a mask of one row, other than documents alone, may hide whole tokens."""
    has_ranges = mask.key_ranges is not None and mask.packing is not PackingHint.ONLY
    return has_ranges or _has_holes(mask)


def _has_holes(mask: MaskArguments) -> bool:
    """Whether the mask of one row hides keys other than by a range; always while tracing."""
    return mask.attn_mask is not None and tuple(mask.attn_mask.shape[:3]) == (1, 1, 1)


def _kept(mask: MaskArguments, end: Tensor) -> Tensor | None:
    """Bool (Sq,), whether the own keys of queries, those before `end`, are kept; None: all."""
    if _has_holes(mask):
        kept = mask.attn_mask[0, 0, 0]
        kept = kept if kept.dtype == torch.bool else kept == 0
        return kept.gather(0, (end - 1).clamp(0, kept.shape[0] - 1).long())
    if mask.key_ranges is None:
        return None
    lo, hi = mask.key_ranges[0, 0].unbind(-1)
    return (lo < end) & (end <= hi)


def _restricted(mask: MaskArguments, lo: Tensor, hi: Tensor) -> MaskArguments:
    """The mask with the keys of each query restricted to bounds (B, Sq) or (Sq,)."""
    lo, hi = (x.reshape(-1, 1, x.shape[-1]) for x in (lo, hi))
    if mask.key_ranges is not None:
        lo = torch.maximum(mask.key_ranges[..., 0], lo)
        hi = torch.minimum(mask.key_ranges[..., 1], hi)
    kept = mask.attn_mask
    if kept is not None and kept.dtype == torch.bool:  # which excludes key ranges
        kept = encodings.added_to_scores(kept)  # its blocks are the same
    return mask._replace(key_ranges=torch.stack([lo, hi], -1).int(), attn_mask=kept)


# Multi-head latent attention (DeepSeek V2, V3 and similar models) on the latent cache.
#
# transformers caches one latent of r numbers and one rotated key per token, and in each step
# expands all of them to the keys and values of every head. Decoding does not need that: with W_UK
# absorbed into the query and W_UV into the output, every head attends the latents themselves, as
# one key head of r + rope dimensions whose values are its first r dimensions.
#
# Source: DeepSeek-AI, DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.


# Calls with more queries expand: absorbed ones take three to four times the arithmetic per query.
MAX_ABSORBED_QUERIES = 16


def install_latents(module: ModuleType, is_ours: Callable[[object], bool]) -> bool:
    """Make the attention classes of a modeling module pass latents unexpanded. Idempotent.

    `is_ours(config)` is whether our attention function will be called. Returns whether there is a
    class to patch; one whose `expand_kv` has other parameters is not patched.
    """
    found = False
    for value in list(vars(module).values()):
        if not (inspect.isclass(value) and "expand_kv" in vars(value)):
            continue
        original = value.expand_kv
        if hasattr(original, "_fa_ops_original"):
            found = True
        elif list(inspect.signature(original).parameters) == ["self", "kv_nope", "k_rot"]:
            value.expand_kv = _deferred(original, is_ours, _caches_expanded_keys(value))
            found = True
    return found


def _caches_expanded_keys(layer: type) -> bool:
    """Whether a class caches what `expand_kv` returns, as earlier releases of transformers do."""
    try:
        source = inspect.getsource(layer.forward)
    except (OSError, TypeError):
        return True
    return source.find(".expand_kv(") < source.find(".update(")


def _deferred(original: Callable, is_ours: Callable[[object], bool], is_cached: bool) -> Callable:
    @functools.wraps(original)
    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        # a cache of keys without features, those of no rotated ones, would count no tokens
        if is_ours(self.config) and not (is_cached and k_rot.shape[-1] == 0):
            return k_rot, kv_nope
        return original(self, kv_nope, k_rot)

    expand_kv._fa_ops_original = original
    return expand_kv


def is_latent(layer: nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether key and value are latents that `expand_kv` did not expand."""
    patched = hasattr(getattr(type(layer), "expand_kv", None), "_fa_ops_original")
    return patched and key.shape[1] == 1 and key.shape[-1] == layer.qk_rope_head_dim


def expand_latents(layer: nn.Module, k_rot: Tensor, kv_nope: Tensor) -> tuple[Tensor, Tensor]:
    """Expand latents to the keys and values of every head."""
    return type(layer).expand_kv._fa_ops_original(layer, kv_nope, k_rot)


def has_plain_projection(layer: nn.Module) -> bool:
    """Whether the projection of latents is a weight, which can be absorbed."""
    project = layer.kv_b_proj
    is_plain = type(project) is nn.Linear and project.bias is None
    return is_plain and project.weight.dtype.is_floating_point


def can_absorb(layer: nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether there are few queries on a longer cache, and the projection is a plain weight."""
    if not has_plain_projection(layer):
        return False
    return 4 * query.shape[2] <= key.shape[2] and query.shape[2] <= MAX_ABSORBED_QUERIES


def absorb_latents(
    layer: nn.Module, query: Tensor, k_rot: Tensor, kv_nope: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query (B, Hq, Sq, r + rope), key (B, 1, Sk, r + rope), value (B, 1, Sk, r), W_UV."""
    up_k, up_v = _up_projections(layer)
    q_nope, q_rot = query.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
    q_latent = torch.einsum("bhqn,hnr->bhqr", q_nope, up_k.to(query.dtype))
    key = torch.cat([kv_nope, k_rot], -1)  # values are a view of it, so a kernel reads them once
    return torch.cat([q_latent, q_rot], -1), key, key[..., : kv_nope.shape[-1]], up_v


def _up_projections(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """W_UK (H, nope, r) and W_UV (H, Dv, r)."""
    widths = [layer.qk_nope_head_dim, layer.v_head_dim]
    weight = layer.kv_b_proj.weight
    return weight.view(-1, sum(widths), weight.shape[1]).split(widths, 1)


def project_out(out: Tensor, up_v: Tensor) -> Tensor:
    """Project the output from latents (B, Sq, H, r) to values (B, Sq, H, Dv)."""
    return torch.einsum("bqhr,hvr->bqhv", out, up_v.to(out.dtype)).contiguous()
