"""What processes of GPUs tell each other before they read each other's memory."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch

from fa_ops.distributed import peer_memory, transport
from fa_ops.distributed.layout import Members

DEVICE = torch.device("cuda", 0)
ONE_HOST = ["a GPU-0", "a GPU-1"]


def agree(*answers, memory=None, no_access=None):
    """What process 0 of two concludes, given what both show in each exchange."""
    with (
        mock.patch.object(transport, "_host", return_value="a"),
        mock.patch.object(transport, "_uuid", return_value="GPU-0"),
        mock.patch.object(transport, "_no_access", return_value=no_access),
        mock.patch.object(peer_memory, "error", return_value=None),
        mock.patch.object(peer_memory, "PeerMemory", side_effect=memory),
        mock.patch.object(transport, "exchanged", side_effect=answers) as exchanged,
    ):
        found = transport._shared_memory(Members(None, 0, 2), mock.Mock(), DEVICE, None)
        assert exchanged.call_count == len(answers)
        return found, [call.args[1] for call in exchanged.call_args_list]


def test_processes_that_can_read_each_other_share_memory():
    memory = mock.Mock(rank=0, size=2)
    found, shown = agree(ONE_HOST, ["", ""], ["", ""], memory=[memory])
    assert found.memory is memory and shown == ["a GPU-0", "", ""]


def test_processes_on_several_hosts_send_messages_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, _ = agree(["a GPU-0", "b GPU-1"])
    assert found == "the processes are on several hosts"


def test_what_one_process_lacks_all_hear_of():
    with pytest.warns(RuntimeWarning, match="through NCCL, which is slower here: of it .process 1"):
        found, _ = agree(ONE_HOST, ["", "of it"])
    assert found == "of it (process 1)"
    with pytest.warns(RuntimeWarning, match="here: no access .process 0"):
        found, shown = agree(ONE_HOST, ["no access", ""], no_access="no access")
    assert shown[1] == "no access"


def test_an_error_of_symmetric_memory_is_shown_to_all():
    failed = "symmetric memory cannot be made: no memory"
    with pytest.warns(RuntimeWarning, match=failed):
        found, shown = agree(ONE_HOST, ["", ""], [failed, ""], memory=RuntimeError("no memory"))
    assert found == f"{failed} (process 0)" and shown[2] == failed
    with pytest.warns(RuntimeWarning, match="of the other .process 1"):
        found, _ = agree(ONE_HOST, ["", ""], ["", "of the other"], memory=[mock.Mock()])
    assert isinstance(found, str)


@pytest.mark.parametrize(
    "uuids, access, reason",
    [
        (("u0", "u1"), True, None),
        (("u0", "u1"), False, "GPU 0 has no access to the memory of GPU 1"),
        (("u0", "u0"), True, "several processes have the same GPU"),
        (("u0", "u7"), True, "CUDA_VISIBLE_DEVICES hides GPUs of other processes"),
    ],
)
def test_access_to_the_memory_of_others(uuids, access, reason):
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "can_device_access_peer", return_value=access),
        mock.patch.object(transport, "_uuid", lambda device: f"u{device.index}"),
    ):
        assert transport._no_access(DEVICE, uuids) == reason
