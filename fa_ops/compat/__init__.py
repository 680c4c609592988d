"""Functions with the names and arguments of other libraries, for code written for these.

`install` puts the packages of this folder where `import flash_attn` finds them.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fa_ops.compat import flash_attn as flash_attn
    from fa_ops.compat import flash_attn_interface as flash_attn_interface
    from fa_ops.compat import ring_flash_attn as ring_flash_attn
    from fa_ops.compat import sdpa as sdpa

__all__ = ["install", "uninstall"]

_SUBMODULES = ("flash_attn", "flash_attn_interface", "ring_flash_attn", "sdpa")


def __getattr__(name: str) -> ModuleType:
    """A submodule, imported where it is first used."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])


_FLASH = "fa_ops.compat.flash_attn"
_FLASH_3 = "fa_ops.compat.flash_attn_interface"
_RING = "fa_ops.compat.ring_flash_attn"


class Package(NamedTuple):
    """A package of other code: its distribution, and where its modules are taken from."""

    distribution: str
    modules: dict[str, str | None]  # name -> module of fa_ops; None: empty


PACKAGES = {
    "flash_attn": Package(
        "flash_attn",
        {
            "flash_attn": _FLASH,
            "flash_attn.bert_padding": f"{_FLASH}.bert_padding",
            "flash_attn.flash_attn_interface": f"{_FLASH}.flash_attn_interface",
            "flash_attn.layers": None,
            "flash_attn.layers.rotary": f"{_FLASH}.layers.rotary",
            "flash_attn.ops": None,
            "flash_attn.ops.triton": None,
            "flash_attn.ops.triton.rotary": f"{_FLASH}.ops.triton.rotary",
            "flash_attn_2_cuda": f"{_FLASH}.raw",
        },
    ),
    "flash_attn_interface": Package(
        "flash_attn_3",
        {
            "flash_attn_interface": _FLASH_3,
            "flash_attn_3": None,
            "flash_attn_3.flash_attn_interface": _FLASH_3,
        },
    ),
    "ring_flash_attn": Package("ring_flash_attn", {"ring_flash_attn": _RING}),
}


def install(name: str) -> None:
    """Let code that imports flash-attn run on fa_ops, unmodified.

    After the call, `import flash_attn` and its submodules, `importlib.util.find_spec`, and
    `importlib.metadata.version` find the modules of `fa_ops.compat`. Call it before other libraries
    are imported: many look for flash-attn only once. Nothing is written to disk.

    Args:
        name: "flash_attn" (FlashAttention 2), "flash_attn_interface" (FlashAttention 3) or
            "ring_flash_attn".

    Raises:
        ValueError: another name.
        RuntimeError: the real package has been imported in this process.

    Examples:
        >>> fa_ops.compat.install("flash_attn")
        >>> from flash_attn import flash_attn_func
    """
    package = _package(name)
    for module in package.modules:
        found = sys.modules.get(module)
        if found is not None and not _is_ours(found):
            origin = getattr(found, "__file__", "?")
            raise RuntimeError(
                f"{module} has been imported from {origin}: call install before the first import"
            )
    for module in package.modules:
        if module not in sys.modules:
            sys.modules[module] = module_from_spec(spec := _spec_of(module, package.modules))
            spec.loader.exec_module(sys.modules[module])
            parent, _, child = module.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, sys.modules[module])
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    version = importlib.import_module(package.modules[name]).__version__
    _finder.installed[package.distribution] = _Installed(package, version)


def uninstall(name: str) -> None:
    """Undo :func:`install`. Modules that have been imported keep what they imported.

    Args:
        name: one of those of install; without an installed package nothing changes.

    Raises:
        ValueError: another name.
    """
    package = _package(name)
    for module in package.modules:
        if _is_ours(sys.modules.get(module)):
            del sys.modules[module]
    _finder.installed.pop(package.distribution, None)
    if not _finder.installed and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _package(name: str) -> Package:
    if not isinstance(name, str) or name not in PACKAGES:
        raise ValueError(f"name must be one of {', '.join(PACKAGES)}, got {name!r}")
    return PACKAGES[name]


def _is_ours(module: ModuleType | None) -> bool:
    return getattr(getattr(module, "__spec__", None), "loader_state", None) is PACKAGES


def _spec_of(name: str, modules: dict[str, str | None]) -> ModuleSpec:
    """The spec of a module with this name; a package's submodules are those of `modules` alone."""
    is_package = any(other.startswith(f"{name}.") for other in modules)
    return ModuleSpec(name, _Copying(modules), loader_state=PACKAGES, is_package=is_package)


class _Copying(Loader):
    """Gives modules the contents of those of fa_ops, but for submodules, which are copies too."""

    def __init__(self, modules: dict[str, str | None]) -> None:
        self._modules = modules

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        name = module.__name__
        source = self._modules[name]
        if source is not None:
            real = importlib.import_module(source)
            kept = {
                k: v
                for k, v in vars(real).items()
                if not _is_special(k) and f"{name}.{k}" not in self._modules
            }
            vars(module).update(kept, __doc__=real.__doc__, __file__=real.__file__)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name not in ("__version__", "__all__", "__getattr__")


def _is_imported_now() -> bool:
    """Whether the finder's caller is an import, and does not merely ask where a module is."""
    return sys._getframe(3).f_code.co_name == "_find_and_load_unlocked"


class _Installed(Distribution):
    """What importlib.metadata knows of an installed package."""

    def __init__(self, package: Package, version: str) -> None:
        self.modules = package.modules
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {package.distribution}\n"
            f"Version: {version}\nSummary: The functions of fa_ops under this name.\n",
            "top_level.txt": "\n".join(m for m in package.modules if "." not in m),
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path):
        raise FileNotFoundError(f"{path} is not on disk: fa_ops.compat.install made the package")


class _Finder(DistributionFinder):
    """Finds the packages that are installed, and their distributions."""

    def __init__(self) -> None:
        self.installed: dict[str, _Installed] = {}

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        """The spec of a module that was taken out of sys.modules, or is reloaded.

        Raises:
            ModuleNotFoundError: an import asks for a module that fa_ops does not stand in for.
                `importlib.util.find_spec`, by which libraries look for modules, gets None.
        """
        for installed in self.installed.values():
            if fullname in installed.modules:
                return _spec_of(fullname, installed.modules)
        package = fullname.partition(".")[0]
        for installed in self.installed.values():
            if package in installed.modules and _is_imported_now():
                known = ", ".join(name for name, source in installed.modules.items() if source)
                raise ModuleNotFoundError(
                    f"No module named {fullname!r}: fa_ops stands in for {package} and has no "
                    f"{fullname}, only {known}; the others are in the real package, after "
                    f"fa_ops.compat.uninstall({package!r})",
                    name=fullname,
                )
        return None

    def find_distributions(self, context=None):
        """The distribution of the name that is asked for, or all."""
        if context is None or context.name is None:
            return list(self.installed.values())
        name = context.name.lower().replace("-", "_").replace(".", "_")
        return [self.installed[name]] if name in self.installed else []


_finder = _Finder()
