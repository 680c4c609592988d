"""DTensor rules: the operators on inputs sharded over batch, heads or length.

The sharding of the query decides. On mesh dimensions where it is sharded over batch or heads, all
other arguments and the results are sharded likewise, without communication. Where it is sharded
over its length, heads are exchanged so that each process has all tokens of some of them; where
their number does not permit that, keys and values are gathered, and each process attends them with
its own queries. Other inputs are gathered with a warning. Plain tensors other than query, key and
value count as replicated. This module is imported together with torch's DTensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from fa_ops.distributed.schedule import Mask, visible
from fa_ops.ops import axes, library

ROWS = 2  # a role beside axes.BATCH and axes.HEADS: queries are sharded over their length
_ROWS = dict.fromkeys(("query", "out", "lse", "grad_out", "grad_lse", "grad_dot"), 2)
_ROWS |= {f"{name}_t": axis for name, axis in _ROWS.items()}


def _roles(operator: OpOverload, call: dict) -> list[int | None]:
    """What each mesh dimension shards: batch, heads, rows, or None for nothing."""
    query, key = call["query"], call["key"]
    batch, heads = axes.of(call)["query"]
    length = 0 if batch is None else 2
    roles, shards = [], 1
    for size, placement in zip(query.device_mesh.shape, query.placements, strict=True):
        axis = placement.dim if type(placement) is Shard else None
        role = None
        if axis == batch and axis is not None:
            role = axes.BATCH
        elif axis in (heads, length) and key.shape[heads] % (shards * size) == 0:
            role, shards = axes.HEADS, shards * size
        elif axis == length and ROWS not in roles and _can_shard_rows(call):
            role = ROWS
        elif not placement.is_replicate() and "out" not in call:
            warnings.warn(
                f"{operator.name()}: query is {placement} over a mesh dimension of size {size}, "
                "which attention does not support: all inputs are gathered there",
                stacklevel=2,
            )
        roles.append(role)
    return roles


def _can_shard_rows(call: dict) -> bool:
    """Whether key ranges can express the mask of some rows of a dense call."""
    names = "attn_mask", "alibi_slopes", "cu_seqlens_q", "block_indices"
    absent = [call.get(name) for name in names]
    scale = call.get("q_scale")
    return all(x is None for x in absent) and (scale is None or scale.dim() < 3)


def _axis(call_axes: dict, name: str, x: Tensor, role: int | None) -> int | None:
    """The dimension of an argument that a role shards; None if all shards have the same."""
    if role == ROWS:
        return _ROWS.get(name)
    axis = None if role is None else call_axes.get(name, (None, None))[role]
    if axis is None or (name in axes.SCALES and x.dim() < 2):
        return None
    axis -= axes.RANKS.get(name, x.dim()) - x.dim()
    if axis < 0:
        return None
    # slopes of one row are those of a batch of one, of which some shards have nothing
    can_broadcast = name != "alibi_slopes" and role in axes.BROADCAST.get(name, ())
    return None if can_broadcast and x.shape[axis] == 1 else axis


def _rows_alone(operator: OpOverload, call: dict, local: dict, roles: list) -> dict:
    """The options of this process's rows over all keys: their intervals of keys as key_ranges.

    Where keys are quantised, `kv_lens` also say which of them the scales are of.
    """
    query, mesh, dim = call["query"], call["query"].device_mesh, roles.index(ROWS)
    Sq, Sk = query.shape[2], call["key"].shape[2]
    part = -(-Sq // mesh.shape[dim])
    start = min(mesh.get_coordinate()[dim] * part, Sq)
    rows = torch.arange(start, min(start + part, Sq), device=local["query"].device)
    tensors = (None if local.get(n) is None else local[n].long() for n in ("kv_lens", "key_ranges"))
    sides = (local.get(name, -1) for name in ("window_left", "window_right"))
    mask = Mask(Sq, Sk, local.get("is_causal", False), *sides, *tensors)
    ranges = torch.stack(tuple(visible(mask, rows)), -1).int()
    plain = {"is_causal": False, "window_left": -1, "window_right": -1}
    if operator._opname != "quantized_attention":
        plain["kv_lens"] = None
    return local | plain | {"key_ranges": ranges}


def _local(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    # This runs below autograd, but redistribute is an autograd function and reads requires_grad.
    return x.detach().redistribute(mesh, placements).to_local()


def _global(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> DTensor:
    return DTensor.from_local(
        x, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _on_meta(x: object) -> object:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _attention_rule(cls, operator: OpOverload, types, args: tuple, options: dict | None = None):
    call = axes.bind(operator, args, options or {})
    if call.get("dropout_p"):
        raise NotImplementedError(f"{operator.name()} with dropout_p > 0 does not support DTensors")
    for name in ("query", "key", "value"):
        if name in call and not isinstance(call[name], DTensor):
            raise TypeError(
                f"{operator.name()}: {name} must be a DTensor if another argument is one, got "
                f"{type(call[name]).__name__}: pass distribute_tensor({name}, mesh, placements)"
            )
    # The global call on meta tensors checks the user's arguments and gives the shapes of results.
    whole = operator(**{name: _on_meta(x) for name, x in call.items()})
    mesh, roles, call_axes = call["query"].device_mesh, _roles(operator, call), axes.of(call)

    def placements(name: str, x: Tensor, otherwise: Placement) -> list[Placement]:
        dims = [_axis(call_axes, name, x, role) for role in roles]
        return [
            Replicate() if role is None else otherwise if dim is None else Shard(dim)
            for role, dim in zip(roles, dims, strict=True)
        ]

    local = {
        name: _local(x, mesh, placements(name, x, Replicate())) if isinstance(x, Tensor) else x
        for name, x in call.items()
    }
    if ROWS in roles:
        local = _rows_alone(operator, call, local, roles)
    results = operator(**local)
    if isinstance(results, Tensor):
        out = _global(results, mesh, placements("out", whole, Replicate()), whole)
        return _over_length(out, "out", call, roles)
    return tuple(
        _over_length(
            _global(
                part,
                mesh,
                # The gradient of an argument that all shards share is a sum over the shards.
                placements(name, like, Replicate() if axes.is_absent(name, like) else Partial()),
                like,
            ),
            name,
            call,
            roles,
        )
        for name, part, like in zip(axes.RESULTS[operator._opname], results, whole, strict=True)
    )


def _over_length(result: DTensor, name: str, call: dict, roles: list) -> DTensor:
    """A result sharded over its length where the argument was: heads are exchanged back."""
    if name in ("attn_mask", "sinks") or axes.is_absent(name, result):
        return result
    dense = axes.of(call) is axes.DENSE
    tokens = 2 if dense else 0
    length = 1 if name in ("lse", "grad_dot") and not dense else tokens
    like = call[name] if isinstance(call.get(name), DTensor) else call["query"]
    placements = [
        Shard(length) if role is not None and type(old) is Shard and old.dim == tokens else new
        for role, old, new in zip(roles, like.placements, result.placements, strict=True)
    ]
    return result if placements == list(result.placements) else _redistributed(result, placements)


def _redistributed(x: DTensor, placements: Sequence[Placement]) -> DTensor:
    """The same values at other places, with the strides of the whole kept."""
    local = x.redistribute(x.device_mesh, placements).to_local()
    return _global(local, x.device_mesh, placements, x)


def _merge_rule(cls, operator: OpOverload, types, args: tuple, options: dict | None = None):
    outs, lses = axes.bind(operator, args, options or {}).values()
    mesh = next(x.device_mesh for x in (outs, lses) if isinstance(x, DTensor))
    shared = outs if isinstance(outs, DTensor) else lses
    shardable = range(1, lses.dim())  # not the states, nor the value dimension
    placements = [
        p if type(p) is Shard and p.dim in shardable else Replicate() for p in shared.placements
    ]
    results = operator(_local(outs, mesh, placements), _local(lses, mesh, placements))
    whole = operator(_on_meta(outs), _on_meta(lses))
    after = [Shard(p.dim - 1) if type(p) is Shard else p for p in placements]
    return tuple(_global(x, mesh, after, like) for x, like in zip(results, whole, strict=True))


def _mask_rule(cls, operator: OpOverload, types, args: tuple, options: dict | None = None):
    (mask,) = axes.bind(operator, args, options or {}).values()
    shared = 4 - mask.dim()  # leading dimensions that the mask lacks
    placements = [
        p if type(p) is Shard and p.dim + shared in (axes.BATCH, axes.HEADS) else Replicate()
        for p in mask.placements
    ]
    after = [Shard(p.dim + shared) if type(p) is Shard else p for p in placements]
    blocks = operator(_local(mask, mask.device_mesh, placements))
    return _global(blocks, mask.device_mesh, after, operator(_on_meta(mask)))


def _select_rule(cls, operator: OpOverload, types, args: tuple, options: dict | None = None):
    """Lists of batch elements, or of rows: all keys, and all heads, are summed over by each."""
    call = axes.bind(operator, args, options or {})
    tensors = {name: x for name, x in call.items() if isinstance(x, Tensor)}
    whole = operator(**{name: _on_meta(x) for name, x in call.items()})
    shared = next(x for x in tensors.values() if isinstance(x, DTensor))
    mesh, of_query = shared.device_mesh, call["query"]
    given = of_query.placements if isinstance(of_query, DTensor) else [Replicate()] * mesh.ndim
    if any(not p.is_replicate() and p != Shard(0) for p in given):
        warnings.warn(
            f"{operator.name()}: query is {tuple(given)}, of which lists can only have batch "
            "elements apart: all inputs are gathered on the other mesh dimensions",
            stacklevel=2,
        )
    placements = [p if p == Shard(0) else Replicate() for p in given]

    def local(name: str, x: Tensor) -> Tensor:
        is_shared = name in ("key_ranges", "attn_mask") and x.shape[0] == 1
        return _local(x, mesh, [Replicate()] * mesh.ndim if is_shared else placements)

    lists = operator(**call | {name: local(name, x) for name, x in tensors.items()})
    return _global(lists, mesh, placements, whole)


def _refused(cls, operator: OpOverload, types, args: tuple, options: dict | None = None):
    raise NotImplementedError(
        f"{operator.name()} does not support DTensors: its terms are packed for one process; call "
        "it on .to_local() of tensors that are sharded over batch or heads"
    )


_REFUSED = (
    "attention_programmed", "attention_programmed_max", "attention_programmed_backward"
)  # fmt: skip
for _name in axes.RESULTS:
    if _name in _REFUSED:
        library.register_subclass_rule(_name, DTensor, _refused)
        continue
    library.register_subclass_rule(_name, DTensor, _attention_rule)
library.register_subclass_rule("merge_states", DTensor, _merge_rule)
library.register_subclass_rule("select_tokens", DTensor, _select_rule)
library.register_subclass_rule("mask_blocks", DTensor, _mask_rule)
