"""How keys travel between the processes of a group: by reading each other's memory, or by messages.

GPUs of one host with access to each other's memory read it ("peer"); otherwise the group's backend
sends messages. All processes of a group agree on that once, in the first call.
"""

from __future__ import annotations

import os
import platform
import warnings
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from fa_ops.distributed import agreement
from fa_ops.distributed.exchange import Exchange
from fa_ops.distributed.layout import Members, SequenceLayout
from fa_ops.distributed.peer_exchange import PeerExchange
from fa_ops.distributed.peer_protocol import PeerProtocol
from fa_ops.tracing import is_capturing

TRANSPORTS = ("auto", "peer", "nccl")

# of a group and then a device: what the processes share, or why they share nothing
_agreed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def exchange(
    members: Members, device: torch.device, asked: str, keys: SequenceLayout, scheme: str,
    timeout: float | None,
) -> Exchange | PeerExchange:  # fmt: skip
    """What exchanges the keys of a call.

    Raises:
        NotImplementedError: "peer" is asked for and cannot be had, in all processes.
    """
    if members.size == 1 or asked == "nccl":
        return Exchange(members, timeout)
    found = _unsuitable(device) or agreed(members, device, timeout)
    if isinstance(found, PeerProtocol):
        return PeerExchange(found, keys, scheme)
    if asked == "peer":
        raise NotImplementedError(f"transport 'peer' cannot be used: {found}")
    return Exchange(members, timeout)


def describe(members: Members, device: torch.device, asked: str) -> str:
    """What `exchange` would use, as far as this process knows."""
    if members.size == 1:
        return "none, there is one process"
    backend = dist.get_backend(members.group)
    if asked == "nccl":
        return backend
    group = members.group or dist.group.WORLD
    found = _unsuitable(device) or _agreed.get(group, {}).get(device)
    if found is None:
        return f"peer or {backend}, which the processes agree on in the first call"
    return "peer" if isinstance(found, PeerProtocol) else f"{backend}, as {found}"


def _unsuitable(device: torch.device) -> str | None:
    """Why a call cannot read the memory of other processes, whatever the group is."""
    if device.type != "cuda":
        return f"memory on {device.type} is not shared"
    if is_capturing(device):
        return "a CUDA graph would replay the signals between processes with their old numbers"
    return None


def agreed(members: Members, device: torch.device, timeout: float | None) -> PeerProtocol | str:
    """What the group's processes share, or why they share nothing; the same on all of them."""
    group = members.group or dist.group.WORLD
    known = _agreed.setdefault(group, {})
    if device not in known:
        known[device] = _agree(members, group, device, timeout)
    return known[device]


def _agree(
    members: Members, group: dist.ProcessGroup, device: torch.device, timeout: float | None
) -> PeerProtocol | str:
    exchanged = lambda text: agreement.exchanged(members, text, device, timeout)  # noqa: E731
    from fa_ops.distributed import peer_memory

    shown = exchanged(f"{_host()} {_uuid(device)}")
    hosts, uuids = zip(*(text.rsplit(" ", 1) for text in shown), strict=True)
    if len(set(hosts)) > 1:
        return "the processes are on several hosts"
    reason = _first(exchanged(peer_memory.error() or _no_access(device, uuids) or ""))
    if reason is None:
        protocol, failed = None, ""
        try:
            protocol = PeerProtocol(peer_memory.PeerMemory(group, device))
        except Exception as error:  # whatever it is, the others are waiting to hear of it
            failed = f"symmetric memory cannot be made: {error}"
        reason = _first(exchanged(failed))  # counters are zero before anyone goes on
        if reason is None:
            return protocol
    warnings.warn(
        f"context parallel attention exchanges keys through NCCL, which is slower here: {reason}. "
        "transport='nccl' chooses that without this warning.",
        RuntimeWarning,
        stacklevel=2,
    )
    return reason


def _first(reasons: list[str]) -> str | None:
    """The reason of the first process that has one."""
    return next((f"{x} (process {rank})" for rank, x in enumerate(reasons) if x), None)


def _host() -> str:
    """What processes of one host have in common, and others do not."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else os.getppid()}"


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _no_access(device: torch.device, uuids: tuple[str, ...]) -> str | None:
    """Why this process cannot read the memory of all others' GPUs, or None."""
    if len(set(uuids)) < len(uuids):
        return "several processes have the same GPU"
    visible = {_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    for uuid in uuids:
        if uuid not in visible:
            return "CUDA_VISIBLE_DEVICES hides GPUs of other processes"
        other = visible[uuid]
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            return f"GPU {device.index} has no access to the memory of GPU {other}"
    return None
