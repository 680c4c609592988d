"""Metadata of a build: the addresses of the project, and a README whose links work elsewhere.

The repository's address is known where a release is built: ``REPO_URL`` names it, and the workflow
sets it. Without it, links of the README stay relative, and the metadata has no addresses.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A link or picture whose target is a file of the repository.
_TARGET = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^]]*\])*\])\((?!https?://|#)([^)\s]+)\)")


class ProjectMetadata(MetadataHookInterface):
    """Add the fields that depend on the address of the repository."""

    def update(self, metadata: dict) -> None:
        """Called by hatchling for every build."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("REPO_URL", "").rstrip("/")
        if repository:
            text = absolute(text, repository)
            documentation = f"{repository}/blob/main/docs/index.md"
            metadata["urls"] = {
                "Homepage": repository,
                "Documentation": os.environ.get("SITE_URL") or documentation,
                "Changes": f"{repository}/blob/main/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str) -> str:
    """The text with links into the repository, and pictures as their files."""

    def link(match: re.Match) -> str:
        picture, words, target = match.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}{words}({repository}/{kind}/main/{target})"

    return _TARGET.sub(link, text)
