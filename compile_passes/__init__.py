"""torch.compile passes that rewrite hand-written attention into torch.ops.fa.attention.

The path of one graph, which `fuse.py` follows from top to bottom:

    rewrites/                other spellings (calls, einsums, writes) become products and softmax
    ir/graph.py              nodes become values with canonical operation names; writes are tracked
    match/matcher.py         each softmax: product of query and key -> scores -> weights -> output
    match/attention_site.py  which axes of a match are batch, heads, queries, keys and features
    masks/classify.py        its masks, evaluated symbolically (symbolic_eval.py), become arguments
    emit/replace.py          the call is emitted, optionally verified (verify.py), and put in place
    rewrites/edit_log.py     rewrites that led to no fusion are undone
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
