"""torch.compile passes that rewrite hand-written attention into torch.ops.fa.attention.

The path of one graph, which `fuse.py` follows from top to bottom:

    rewrites/                 other spellings (calls, einsums, writes) become products and softmax
    ir/graph.py               nodes become values with canonical operation names, which writes end
    match/matcher.py          each softmax: product of query and key, scores, weights, output
    match/attention_site.py   which axes of a match are batch, heads, queries, keys and features
    masks/classification.py   its masks, evaluated by symbolic_evaluator.py, become arguments
    emit/replacement.py       the call is emitted, if asked for verified, and put in place
    rewrites/edit_log.py      rewrites that led to no fusion are undone
"""

from compile_passes.fuse import explain, fuse, fuse_module
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
