"""Driver calls of the Hopper backend, with a driver that answers as told."""

import pytest
import torch

from fa_ops.backends.hopper import compiler, launch

load = launch._load  # the `driver` fixture replaces it


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
    assert len(tensor_map[256]) == 128
    assert driver.called[1:] == ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", driver.called[0]]
    driver.answers["cuTensorMapEncodeTiled"] = [1]
    with pytest.raises(launch.DriverError, match=r"cuTensorMapEncodeTiled .*shape \(1, 2, 3, 64\)"):
        tensor_map[512]


@pytest.fixture
def recompiled(driver, monkeypatch):
    """The sources that were compiled again, because the driver refused what was stored."""
    sources = []

    def replacements(source, refused):
        assert refused == b"stored"
        sources.append(source)
        yield b"new"

    monkeypatch.setattr(launch, "_load", load)
    monkeypatch.setattr(compiler, "compiled", lambda sources: [b"stored"] * len(sources))
    monkeypatch.setattr(compiler, "replacements", replacements)
    monkeypatch.setattr(compiler, "nvrtc", lambda: None)
    monkeypatch.setattr(compiler, "version", lambda lib: (13, 0))
    return sources


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_module_that_the_driver_refuses_is_compiled_again(driver, recompiled, call):
    driver.answers[call] = [200]
    entries = [launch.Entry("first", 128), launch.Entry("second", 128)]
    first, second = launch.kernels("packed", None, entries)
    assert recompiled == ["first"]
    assert driver.called.count("cuModuleLoadData") == 3
    assert launch.kernels("packed", None, entries) == (first, second)
    assert driver.called.count("cuModuleLoadData") == 3


def test_a_driver_that_refuses_a_new_module_too(driver, recompiled):
    driver.answers["cuModuleLoadData"] = [209, 209]
    with pytest.raises(launch.DriverError, match=r"\(209\), of a kernel that NVRTC 13.0 has just"):
        launch.kernels("packed", None, [launch.Entry("first", 128)])
    assert recompiled == ["first"]
    launch.kernels("packed", None, [launch.Entry("first", 128)])  # nothing was remembered


@pytest.mark.parametrize("status", [2, 700])
def test_failures_that_are_not_the_modules_compile_nothing(driver, recompiled, status):
    driver.answers["cuModuleLoadData"] = [status]
    with pytest.raises(launch.DriverError, match=rf"cuModuleLoadData failed: .*\({status}\)$"):
        launch.kernels("packed", None, [launch.Entry("first", 128)])
    assert recompiled == []
