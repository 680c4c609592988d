"""torch.compile passes that rewrite hand-written attention into torch.ops.fa.attention."""

from compile_passes.explain import explain
from compile_passes.fuse import fuse, fuse_module
from compile_passes.install import install, uninstall
from compile_passes.report import Finding, Location, Report

__all__ = [
    "Finding",
    "Location",
    "Report",
    "explain",
    "fuse",
    "fuse_module",
    "install",
    "uninstall",
]
