"""Import several checkouts of fa_ops into one process, each under a unique package name."""

from __future__ import annotations

import importlib
import itertools
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

# The kernel cache of all checkouts: a cubin's name is the hash of its source.
CACHE = Path.home() / ".cache" / "fa_ops_compare"

_PACKAGE = re.compile(r"\bfa_ops\b")
# An operator namespace can be defined once: replace "fa", fa::attention and torch.ops.fa.
_NAMESPACE = re.compile(r"""(?<=["'])fa(?=["'])|\bfa(?=::)|(?<=\bops\.)fa\b""")


_numbers = itertools.count()


def load(checkout: Path, folder: Path) -> ModuleType:
    """Copy a checkout's fa_ops to `folder` and import it as fa_ops_0, fa_ops_1, ...

    Its operators are in torch.ops under the same name.

    Raises:
        ValueError: the folder is no checkout.
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
    finally:  # drop the import hooks too, as those of two checkouts would interfere
        sys.path[:], sys.meta_path[:] = before
