"""Errors of the packages that this one needs."""

from __future__ import annotations

import re
from importlib import metadata


def failed_import(user: str, package: str, oldest: str, error: BaseException) -> ImportError:
    """The error for a package whose import failed: it is too old, or what the cause says."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = "none"
    least = [int(n) for n in oldest.split(".")]
    if [int(n) for n in re.findall(r"\d+", found)[: len(least)]] < least:
        remedy = f"pip install '{package}>={oldest}'"
        return ImportError(f"{user} needs {package} {oldest} or later, found {found}: {remedy}")
    while error.__cause__ is not None:
        error = error.__cause__
    return ImportError(f"{package} {found} cannot be imported: {error}")
