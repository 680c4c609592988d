"""Functions with the names and arguments of other libraries, for code written for these."""

from fa_ops.compat.installation import install, uninstall

__all__ = ["install", "uninstall"]
