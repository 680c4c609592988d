"""Driver calls of the Hopper tier, with a driver that answers as told."""

from types import SimpleNamespace

import pytest
import torch

from fa_ops.backends.hopper import launch

ASKED = "cuLaunchKernel", "cuTensorMapEncodeTiled"


@pytest.fixture
def driver(monkeypatch):
    """Its calls are `made`; a launch answers `answers`, one after the other."""
    made, answers = [], []

    def answer(name, status=0):
        def function(*args):
            made.append(name)
            return answers.pop(0) if name in ASKED else status

        return function

    names = (*ASKED, "cuCtxSetCurrent", "cuDevicePrimaryCtxRetain", "cuGetErrorString")
    fake = SimpleNamespace(made=made, answers=answers, **{name: answer(name) for name in names})
    monkeypatch.setattr(launch, "driver", lambda: fake)
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    launch._context.cache_clear()
    yield fake
    launch._context.cache_clear()


def start():
    launch.Kernel(None, 128, 0).launch((1, 1), 0, None)


def test_a_thread_without_a_context_gets_the_runtimes(driver):
    driver.answers[:] = [201, 0]
    start()
    assert driver.made == [
        "cuLaunchKernel", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLaunchKernel"
    ]  # fmt: skip


@pytest.mark.parametrize("answers", [[700], [201, 201]])
def test_other_failures_are_raised_at_once(driver, answers):
    driver.answers[:] = answers
    with pytest.raises(launch.DriverError, match=rf"cuLaunchKernel failed: .*\({answers[-1]}\)"):
        start()
    assert not driver.answers


def test_nothing_is_asked_where_a_context_is(driver):
    driver.answers[:] = [0]
    start()
    assert driver.made == ["cuLaunchKernel"]


def test_tensor_maps_of_a_thread_without_a_context(driver):
    driver.answers[:] = [101, 0]
    tensor_map = launch.TensorMap(torch.bfloat16, (1, 2, 3, 64), (384, 192, 64, 1), 64)
    assert len(tensor_map.at(256)) == 128
    assert driver.made[1:] == ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", driver.made[0]]
    driver.answers[:] = [1]
    with pytest.raises(launch.DriverError, match=r"cuTensorMapEncodeTiled .*shape \(1, 2, 3, 64\)"):
        tensor_map.at(512)
