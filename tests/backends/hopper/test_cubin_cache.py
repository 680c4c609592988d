"""The folder of compiled kernels and the package fa-ops-cubins: what is loaded, and what if not."""

import logging
import multiprocessing
import os
import pwd
import re
import resource
import warnings
from pathlib import Path

import pytest

from fa_ops.backends.hopper.runtime import cubin_cache, nvrtc

# The folder of compiled kernels: what is loaded from it, and what if it cannot be used.

CODE = bytes(range(256)) * 40
ROOT = os.geteuid() == 0


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(cubin_cache, "unsaved", {})
    monkeypatch.setattr(cubin_cache, "_warned", set())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "kernel.cubin"


@pytest.fixture
def compilations(monkeypatch, path):
    """Sources that were compiled; the compiler is a fake, and every source has the same file."""
    compiled = []
    monkeypatch.setattr(nvrtc, "_path", lambda source: path)
    monkeypatch.setattr(
        nvrtc, "compile_source", lambda source: compiled.append(source) or (CODE, "")
    )
    return compiled


def test_compilations_are_logged_with_seconds_and_folder(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "fa_ops")
    monkeypatch.setattr(nvrtc, "_path", lambda source: tmp_path / "cache" / str(source))
    monkeypatch.setattr(nvrtc, "_found", lambda source: CODE if source == "stored" else None)
    monkeypatch.setattr(nvrtc, "compile_source", lambda source: (CODE, ""))
    assert nvrtc.compiled(["a", "b", "stored"]) == [CODE] * 3
    nvrtc.compiled(["stored"])
    (record,) = caplog.records
    begin, seconds, end = re.split(r"(\d+\.\d)", record.getMessage())
    assert (begin, end) == ("compiled 2 kernels in ", f" s, kept in {tmp_path / 'cache'}")


def test_failed_compilations_are_not_logged(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "fa_ops")

    def fail(source):
        raise nvrtc.CompileError(source)

    monkeypatch.setattr(nvrtc, "_path", lambda source: tmp_path / source)
    monkeypatch.setattr(nvrtc, "_found", lambda source: None)
    monkeypatch.setattr(nvrtc, "compile_source", fail)
    with pytest.raises(nvrtc.CompileError, match="a"):
        nvrtc.compiled(["a", "b"])
    assert not caplog.records


def give_away(where: Path, monkeypatch) -> None:
    """Make a file or folder another user's."""
    if ROOT:
        os.chown(where, 54321, 54321)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o002, 0o077])
def test_what_is_stored_is_this_users_alone(path, umask):
    path = path.parent / "below" / path.name
    before = os.umask(umask)
    try:
        cubin_cache.store(path, CODE)
    finally:
        os.umask(before)
    modes = [one.stat().st_mode & 0o777 for one in (path, path.parent, path.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]
    assert cubin_cache.load(path) == CODE
    assert os.listdir(path.parent) == [path.name] and not cubin_cache.unsaved


def flipped(data: bytes) -> bytes:
    return data[:500] + bytes([data[500] ^ 1]) + data[501:]


DAMAGED = {
    "empty": lambda data: b"",
    "only the start of an ELF file": lambda data: b"\x7fELF",
    "the first half": lambda data: data[: len(data) // 2],
    "the last byte is missing": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
    "one bit differs": flipped,
    "longer": lambda data: data + b"\0",
    "without a checksum": lambda data: b"\x7fELF planted \x7fELF",
    "too large": lambda data: data + bytes(cubin_cache.MAX_BYTES),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_replaced(path, compilations, damage):
    cubin_cache.store(path, CODE)
    whole = path.read_bytes()
    path.write_bytes(DAMAGED[damage](whole))
    assert nvrtc.compiled(["source"]) == [CODE] and compilations == ["source"]
    assert path.read_bytes() == whole and path.stat().st_mode & 0o777 == 0o600
    assert nvrtc.compiled(["source"]) == [CODE] and compilations == ["source"]


def link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def other_kernels(path: Path) -> None:
    other = path.with_name("other.cubin")
    cubin_cache.store(other, b"another kernel")
    other.replace(path)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


PLANTED = {
    "a link to a whole file": link,
    "a link to itself": link_to_itself,
    "another kernel's file": other_kernels,
    "a pipe": pipe,
    "writable by the group": lambda path: path.chmod(0o620),
    "writable by others": lambda path: path.chmod(0o602),
}
if ROOT:
    PLANTED["another user's"] = lambda path: os.chown(path, 54321, 54321)


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_file_is_replaced(path, compilations, plant):
    cubin_cache.store(path, CODE)
    PLANTED[plant](path)
    assert cubin_cache.load(path) is None
    assert nvrtc.compiled(["source"]) == [CODE] and compilations == ["source"]
    assert not path.is_symlink() and path.stat().st_mode & 0o7777 == 0o600
    assert path.stat().st_uid == os.geteuid() and cubin_cache.load(path) == CODE


def test_a_folder_in_the_files_place_costs_a_compilation_for_each_process(path, compilations):
    path.mkdir(parents=True, mode=0o700)
    path.parent.chmod(0o700)
    with pytest.warns(RuntimeWarning, match=rf"kept in {path.parent}: Is a directory"):
        assert nvrtc.compiled(["source"]) == [CODE]
    assert path.is_dir() and os.listdir(path.parent) == [path.name]
    assert nvrtc.compiled(["source"]) == [CODE] and compilations == ["source"]
    path.rmdir()  # it is stored as soon as that is possible
    assert nvrtc.compiled(["source"]) == [CODE] and compilations == ["source"]
    assert cubin_cache.load(path) == CODE and not cubin_cache.unsaved


def test_a_file_that_the_driver_refuses_is_replaced(path, compilations):
    cubin_cache.store(path, b"for another driver")
    assert list(nvrtc.replacements("source", b"for another driver")) == [CODE]
    assert compilations == ["source"] and cubin_cache.load(path) == CODE


def world_writable_above(folder: Path, monkeypatch) -> None:
    folder.parent.chmod(0o777)


def link_to_a_writable_folder(folder: Path, monkeypatch) -> None:
    target = folder.with_name("target")
    folder.rename(target)
    target.chmod(0o777)
    folder.symlink_to(target)


UNTRUSTED = {
    "writable by the group": (lambda folder, _: folder.chmod(0o770), "its group or others may"),
    "writable by all": (lambda folder, _: folder.chmod(0o707), "its group or others may"),
    "sticky": (lambda folder, _: folder.chmod(0o1777), "its group or others may"),
    "another user's": (give_away, "it belongs to .*, not to this user or root"),
    "below one that is writable by all": (world_writable_above, "anyone may replace it, as"),
    "a link to one that is writable by all": (link_to_a_writable_folder, "its group or others"),
}


@pytest.mark.parametrize("kind", UNTRUSTED)
def test_a_folder_that_others_can_write_to_is_not_used(path, compilations, monkeypatch, kind):
    cubin_cache.store(path, CODE)
    planted = path.read_bytes()
    change, reason = UNTRUSTED[kind]
    change(path.parent, monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"kept in {path.parent}: {reason}.*FA_OPS_CACHE_DIR"):
        assert nvrtc.compiled(["source"]) == [CODE]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        assert nvrtc.compiled(["source"]) == [CODE]
    assert compilations == ["source"]
    assert os.listdir(path.parent) == [path.name] and path.read_bytes() == planted


def sticky_above(folder: Path) -> None:
    folder.parent.chmod(0o1777)


def group_writable_above(folder: Path) -> None:
    folder.parent.chmod(0o770)


def link_to_a_folder(folder: Path) -> None:
    folder.rename(folder.with_name("target"))
    folder.symlink_to("target")


@pytest.mark.parametrize("change", [sticky_above, group_writable_above, link_to_a_folder])
def test_a_folder_that_only_this_user_can_write_to_is_used(path, change):
    cubin_cache.store(path, CODE)
    change(path.parent)
    assert cubin_cache.load(path) == CODE


@pytest.mark.skipif(not ROOT, reason="gives a folder to another user")
def test_what_root_stored_serves_other_users(path, monkeypatch):
    cubin_cache.store(path, CODE)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert cubin_cache.load(path) == CODE


def place_for(tmp_path: Path, kind: str) -> Path:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    return {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "x",
        "a long name": tmp_path / ("d" * 300),
        "a very long path": tmp_path / ("d/" * 3000),
        "a link to itself": tmp_path / "loop",
        "a link to nothing": tmp_path / "dangling",
        "with a null byte": tmp_path / "a\0b",
        "not UTF-8": tmp_path / "a\ud800b",
        "a device": Path("/dev/null"),
        "not writable": Path("/proc/self/x"),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    "a file|below a file|a long name|a very long path|a link to itself|a link to nothing|"
    "with a null byte|not UTF-8|a device|not writable".split("|"),
)
def test_a_place_where_no_folder_can_be(tmp_path, compilations, monkeypatch, kind):
    path = place_for(tmp_path, kind) / "kernel.cubin"
    monkeypatch.setattr(nvrtc, "_path", lambda source: path)
    with pytest.warns(RuntimeWarning, match="compiled kernels cannot be kept in") as caught:
        for _ in range(3):
            assert nvrtc.compiled(["source"]) == [CODE]
    assert len(caught) == 1 and compilations == ["source"]


def test_a_disk_that_is_full_keeps_what_is_on_it(path):
    """A limit on the size of files makes writing fail as a full disk does."""
    cubin_cache.store(path, CODE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.warns(RuntimeWarning, match="File too large"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            cubin_cache.store(path.with_name("other"), CODE)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(path.parent) == [path.name] and cubin_cache.load(path) == CODE
    assert cubin_cache.unsaved == {path.with_name("other"): CODE}


def test_an_interrupted_write_leaves_nothing(path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cubin_cache.store(path, CODE)
    assert os.listdir(path.parent) == []


def _store_and_load(folder: Path, wrong) -> None:
    for i in range(100):
        path = folder / f"{i % 10}.cubin"
        cubin_cache.store(path, CODE + bytes([i % 10]))
        if cubin_cache.load(path) != CODE + bytes([i % 10]):
            wrong.value += 1


def test_several_processes_at_once(path):
    context = multiprocessing.get_context("fork")
    wrong = context.Value("i", 0)
    workers = [context.Process(target=_store_and_load, args=(path.parent, wrong)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4 and wrong.value == 0
    assert sorted(os.listdir(path.parent)) == [f"{i}.cubin" for i in range(10)]


HOME = pwd.getpwuid(os.getuid()).pw_dir


@pytest.mark.parametrize(
    "variables, folder",
    [
        ({"FA_OPS_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"FA_OPS_CACHE_DIR": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/fa_ops"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/fa_ops"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h/"}, "/h/.cache/fa_ops"),
        ({"HOME": "/"}, "/.cache/fa_ops"),
        ({"HOME": "relative"}, f"{HOME}/.cache/fa_ops"),
        ({"HOME": ""}, f"{HOME}/.cache/fa_ops"),
        ({}, f"{HOME}/.cache/fa_ops"),
    ],
)
def test_the_default_place(monkeypatch, variables, folder):
    for name in ("FA_OPS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
        if name in variables:
            monkeypatch.setenv(name, variables[name])
    assert nvrtc.cache_dir() == Path(folder)


def test_a_user_without_home_and_passwd_entry(monkeypatch):
    for name in ("FA_OPS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert nvrtc.cache_dir() == Path("/.cache/fa_ops")


# Kernels of the optional package fa-ops-cubins: where they are loaded from, and what if not.

DEFINES = {"THREADS": 128}


@pytest.fixture
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


@pytest.mark.usefixtures("cache")
def test_packaged_kernels_need_no_compiler(package, monkeypatch):
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: pytest.fail("NVRTC was loaded"))
    assert nvrtc.compiled([packaged()]) == [b"packaged"]
    assert nvrtc.uncached("mask", ["pack_rows"], DEFINES) == []


@pytest.mark.usefixtures("cache")
def test_other_kernels_are_compiled(package, cache):
    changed = packaged()._replace(source=packaged().source + "\n")
    assert nvrtc.compiled([changed, packaged()]) == [b"compiled", b"packaged"]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("cache")
def test_without_the_package(cache):
    assert cubin_cache.packaged_folder() is None
    assert nvrtc.compiled([packaged()]) == [b"compiled"]


@pytest.mark.usefixtures("cache")
def test_a_chosen_compiler_replaces_the_package(package, monkeypatch):
    monkeypatch.setenv("FA_OPS_NVRTC", "libnvrtc.so.13")
    assert nvrtc.compiled([packaged()]) == [b"compiled"]


@pytest.mark.usefixtures("cache")
def test_what_the_driver_refuses_is_taken_from_the_cache_and_compiled_last(package):
    first = list(nvrtc.replacements(packaged(), b"packaged"))
    assert first == [b"compiled"]  # which is in the cache now
    cubin_cache.store(nvrtc._path(packaged()), b"of another process")
    assert list(nvrtc.replacements(packaged(), b"packaged")) == [
        b"of another process",
        b"compiled",
    ]
