"""Driver calls of the Hopper tier, with a driver that answers as told."""

import pytest
import torch

from fa_ops.backends.hopper import launch


def start():
    launch.Kernel(None, 128, 0).launch((1, 1), 0, None)


def test_a_thread_without_a_context_gets_the_runtimes(driver):
    driver.answers["cuLaunchKernel"] = [201]
    start()
    assert driver.called == [
        "cuLaunchKernel", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLaunchKernel"
    ]  # fmt: skip


@pytest.mark.parametrize("answers", [[700], [201, 201]])
def test_other_failures_are_raised_at_once(driver, answers):
    driver.answers["cuLaunchKernel"] = [*answers]
    with pytest.raises(launch.DriverError, match=rf"cuLaunchKernel failed: .*\({answers[-1]}\)"):
        start()
    assert driver.answers == {"cuLaunchKernel": []}


def test_nothing_is_asked_where_a_context_is(driver):
    start()
    assert driver.called == ["cuLaunchKernel"]


def test_tensor_maps_of_a_thread_without_a_context(driver):
    driver.answers["cuTensorMapEncodeTiled"] = [101]
    tensor_map = launch.TensorMap(torch.bfloat16, (1, 2, 3, 64), (384, 192, 64, 1), 64)
    assert len(tensor_map.at(256)) == 128
    assert driver.called[1:] == ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", driver.called[0]]
    driver.answers["cuTensorMapEncodeTiled"] = [1]
    with pytest.raises(launch.DriverError, match=r"cuTensorMapEncodeTiled .*shape \(1, 2, 3, 64\)"):
        tensor_map.at(512)
