"""Without a GPU the files of this folder are imported, and skipped as a whole.

So are those of the folder hopper on a GPU that is no Hopper.
"""

from __future__ import annotations

import pytest
import torch

from fa_ops.backends import hopper


def pytest_pycollect_makemodule(module_path, parent):
    needs_hopper = module_path.parent.name == "hopper"
    if torch.cuda.is_available() and not (needs_hopper and hopper.available_error()):
        return None
    return SkippedModule.from_parent(parent, path=module_path)


class SkippedModule(pytest.Module):
    def collect(self):
        self.obj  # noqa: B018  (imports the file, which must not fail anywhere)
        pytest.skip(hopper.available_error())
