"""A disk cache of compiled kernels that only this user or root can have written.

A cubin runs with the rights of the process that loads it. A folder is used only if it belongs to
this user or root and neither its group nor others may write to it. The same holds for each file,
which is opened relative to the folder's descriptor, never through a link, and ends with a checksum
of its name and content. All of this is read from open descriptors, so that swapping a path between
check and use gains nothing.

A file that fails these checks is compiled again and replaced. Where that is impossible (read-only,
full, another user's folder) kernels are kept for the process alone, with one warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import secrets
import stat
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 1 << 26  # a hundred times the largest kernel
_DIGEST_BYTES = hashlib.sha256().digest_size

# Compiled by this process, which could not store them.
unsaved: dict[Path, bytes] = {}
_warned: set[Path] = set()
_lock = threading.Lock()


class UntrustedFolder(OSError):
    """Another user may have written to the folder."""


def folder() -> Path:
    """FA_OPS_CACHE_DIR, or fa_ops in the user's cache folder as XDG defines it."""
    chosen = os.environ.get("FA_OPS_CACHE_DIR")
    return Path(chosen) if chosen else Path(_user_cache_folder(), "fa_ops")


def _user_cache_folder() -> str:
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return chosen if os.path.isabs(chosen) else os.path.join(_home(), ".cache")


def _home() -> str:
    """The user's home folder; / without one, as container runtimes set it."""
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        import pwd

        with contextlib.suppress(KeyError):
            home = pwd.getpwuid(os.getuid()).pw_dir
    return home if os.path.isabs(home) else "/"


def load(path: Path) -> bytes | None:
    """The cubin stored at a path; None if there is none that can be trusted."""
    try:
        with opened(path.parent) as parent:
            return _verified(path.name, _read(path.name, parent))
    except UntrustedFolder as error:
        _warn(path.parent, error)
    except (OSError, ValueError):  # ValueError: no path can have that name
        pass
    return None


def store(path: Path, code: bytes) -> None:
    """Store a cubin on disk, or for this process alone where that fails."""
    try:
        _make_private(path.parent)
        with opened(path.parent) as parent:
            _write(path.name, code + _checksum(path.name, code), parent)
        unsaved.pop(path, None)
    except (OSError, ValueError) as error:
        unsaved[path] = code
        _warn(path.parent, error)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a folder that can be trusted; yields its descriptor.

    Raises:
        UntrustedFolder: another user may have written to it.
        OSError: there is no such folder, or it cannot be read.
    """
    real = os.path.realpath(path)
    descriptor = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        reason = _objection(os.fstat(descriptor)) or _objection_above(real)
        if reason:
            raise UntrustedFolder(reason)
        yield descriptor
    finally:
        os.close(descriptor)


def _objection(about: os.stat_result) -> str | None:
    """Why another user may have written to a file or folder, or None."""
    if about.st_uid not in (0, os.geteuid()):
        return f"it belongs to {owner(about)}, not to this user or root"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "its group or others may write to it (chmod go-w mends that)"
    return None


def _objection_above(real: str) -> str | None:
    """Why anyone could put another folder in this one's place, or None.

    What a swapped folder holds is refused by its owner. A group that may write to a folder above is
    therefore accepted: home folders of users with a group of their own are like that.
    """
    for above in Path(real).parents:
        if os.stat(above).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            return f"anyone may replace it, as {above} is writable by all and not sticky"
    return None


def owner(about: os.stat_result) -> str:
    """The name of the user that a file belongs to, with the number."""
    import pwd

    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(about.st_uid).pw_name} ({about.st_uid})"
    return f"uid {about.st_uid}"


def _read(name: str, parent: int) -> bytes:
    # O_NONBLOCK: opening a pipe must not wait for its writer
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(name, "rb", opener=lambda path, _: os.open(path, flags, dir_fd=parent)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES or _objection(about):
            return b""
        return file.read(MAX_BYTES)


def _write(name: str, data: bytes, parent: int) -> None:
    """Replace a file at once: a reader sees the old one or the new one, whole."""
    temporary = f"{name}.{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(
            temporary, "wb", opener=lambda path, _: os.open(path, flags, 0o600, dir_fd=parent)
        ) as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise


def _checksum(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + code).digest()


def _verified(name: str, data: bytes) -> bytes | None:
    code = data[:-_DIGEST_BYTES]
    return code if code and data[-_DIGEST_BYTES:] == _checksum(name, code) else None


def _make_private(path: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def _warn(path: Path, error: Exception) -> None:
    with _lock:
        if path in _warned:
            return
        _warned.add(path)
    reason = getattr(error, "strerror", None) or error
    warnings.warn(
        f"compiled kernels cannot be kept in {path}: {reason}; every process compiles them again. "
        "FA_OPS_CACHE_DIR names another folder.",
        RuntimeWarning,
        stacklevel=2,
    )


# Kernels that the optional package fa-ops-cubins brings, compiled ahead of time.
#
# `python -m fa_ops cubins` builds that package for the version of fa_ops that it runs with. A file
# is named by the hash of the program, its headers and the flags, so that it is never stale: a
# kernel that has changed since is not found, and compiled.

PACKAGE = "fa_ops_cubins"


@functools.cache
def packaged_folder() -> Path | None:
    """The package's folder, or None where it is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    return Path(found.origin).parent if found and found.origin else None


def load_packaged(name: str) -> bytes | None:
    """The machine code in a file of the package, which is installed, or None."""
    path = packaged_folder() / name
    return path.read_bytes() if path.exists() else None
