"""Actions that wait until a module is imported, for parts of torch that not everyone uses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder


class _AfterImport(MetaPathFinder):
    """Finds a module by the finders behind it, and makes its loader run an action afterwards."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self.name, self.action = name, action

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        # Those behind this one alone, as another copy of this class may ask this one in turn.
        all_finders = list(sys.meta_path)
        at = all_finders.index(self) if self in all_finders else -1
        finders = (one.find_spec for one in all_finders[at + 1 :] if hasattr(one, "find_spec"))
        spec = next(filter(None, (find(name, path, target) for find in finders)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module) -> None:
                execute(module)
                if self in sys.meta_path:  # not earlier, as a spec may be requested and not used
                    sys.meta_path.remove(self)
                    self.action()

            spec.loader.exec_module = execute_and_act
        return spec


def _is_of_dropped_modules(finder: object) -> bool:
    """Whether it waits for an import on behalf of this module as it was imported before."""
    kind = type(finder)
    return kind.__module__ == __name__ and kind.__name__ == _AfterImport.__name__


sys.meta_path[:] = [one for one in sys.meta_path if not _is_of_dropped_modules(one)]


def after_import(name: str, action: Callable[[], object]) -> None:
    """Call `action` once the module has been imported; now, if it has been."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))
