"""Kernels of the optional package fa-ops-cubins: where they are loaded from, and what if not."""

import pytest

from fa_ops.backends.hopper.runtime import cubin_cache, nvrtc

DEFINES = {"THREADS": 128}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and a compiler whose machine code is the text "compiled"."""
    monkeypatch.setenv("FA_OPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: None)
    monkeypatch.setattr(nvrtc, "version", lambda lib: (13, 0))
    monkeypatch.setattr(nvrtc, "compile_source", lambda program: (b"compiled", ""))
    cubin_cache.packaged_folder.cache_clear()
    yield tmp_path / "cache"
    cubin_cache.packaged_folder.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with one kernel, that of `packaged()`."""
    folder = tmp_path / cubin_cache.PACKAGE
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / nvrtc.file_name(packaged())).write_bytes(b"packaged")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def packaged():
    return nvrtc.program("mask", "pack_rows", DEFINES)


def test_packaged_kernels_need_no_compiler(package, monkeypatch):
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: pytest.fail("NVRTC was loaded"))
    assert nvrtc.compiled([packaged()]) == [b"packaged"]
    assert nvrtc.uncached("mask", ["pack_rows"], DEFINES) == []


def test_other_kernels_are_compiled(package, cache):
    changed = packaged()._replace(source=packaged().source + "\n")
    assert nvrtc.compiled([changed, packaged()]) == [b"compiled", b"packaged"]
    assert len(list(cache.iterdir())) == 1


def test_without_the_package(cache):
    assert cubin_cache.packaged_folder() is None
    assert nvrtc.compiled([packaged()]) == [b"compiled"]


def test_a_chosen_compiler_replaces_the_package(package, monkeypatch):
    monkeypatch.setenv("FA_OPS_NVRTC", "libnvrtc.so.13")
    assert nvrtc.compiled([packaged()]) == [b"compiled"]


def test_what_the_driver_refuses_is_taken_from_the_cache_and_compiled_last(package):
    first = list(nvrtc.replacements(packaged(), b"packaged"))
    assert first == [b"compiled"]  # which is in the cache now
    cubin_cache.store(nvrtc._path(packaged()), b"of another process")
    assert list(nvrtc.replacements(packaged(), b"packaged")) == [
        b"of another process",
        b"compiled",
    ]
