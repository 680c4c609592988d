"""Several checkouts of fa_ops in one process, each as a package with a name of its own."""

from __future__ import annotations

import importlib
import itertools
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

# Kernels of all checkouts: a cubin's name is the hash of its source.
CACHE = Path.home() / ".cache" / "fa_ops_compare"

_PACKAGE = re.compile(r"\bfa_ops\b")
# torch knows one namespace of a name: "fa", fa::attention, torch.ops.fa
_NAMESPACE = re.compile(r"""(?<=["'])fa(?=["'])|\bfa(?=::)|(?<=\bops\.)fa\b""")


_numbers = itertools.count()


def load(checkout: Path, folder: Path) -> ModuleType:
    """The checkout's fa_ops as a package fa_ops_0, fa_ops_1, ..., copied to `folder`; its operators
    are in torch.ops under the same name.

    Raises ValueError for a folder that is no checkout.
    """
    if not (checkout / "fa_ops" / "__init__.py").is_file():
        raise ValueError(f"{checkout} is no checkout: it has no fa_ops/__init__.py")
    name = f"fa_ops_{next(_numbers)}"
    shutil.copytree(
        checkout / "fa_ops", folder / name, ignore=shutil.ignore_patterns("__pycache__")
    )
    for source in (folder / name).rglob("*.py"):
        source.write_text(_NAMESPACE.sub(name, _PACKAGE.sub(name, source.read_text())))
    before = sys.path[:], sys.meta_path[:]
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    finally:  # without hooks either, that wait for parts of torch: those of two would take turns
        sys.path[:], sys.meta_path[:] = before
