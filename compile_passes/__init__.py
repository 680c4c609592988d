"""torch.compile passes that rewrite hand-written attention into torch.ops.fa.attention.

The path of one graph, which `fuse.py` follows from top to bottom:

    ir/edits.py              unused nodes are dropped
    rewrites/                einsums, FlexAttention, nn.MultiheadAttention become products, softmax
    ir/graph.py              nodes become values with canonical operation names; writes are tracked
    match/matcher.py         each softmax: product of query and key -> scores -> weights -> output
    match/attention_site.py  which axes of a match are batch, heads, queries, keys and features
    masks/classify.py        its masks, evaluated symbolically (symbolic_eval.py), become arguments
    emit/replace.py          the call is emitted, optionally verified (verify.py), and put in place
"""

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
