"""Write the long description of the wheel: README.md with links that work outside the checkout.

A link to a file becomes the address of that file at the released version, in GitHub's form, below
`Repository` of `[project.urls]`. Without that address, links become plain text, and pictures are
left out.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#]+)([^)]*)\)")


class LongDescription(MetadataHookInterface):
    """A hatchling hook that sets `readme`, which pyproject.toml lists as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description."""
        root = Path(self.root)
        address = metadata.get("urls", {}).get("Repository")

        def absolute(link: re.Match[str]) -> str:
            picture, text, file, anchor = link.groups()
            if not (root / file).exists():  # an address, or brackets in code
                return link[0]
            if address is None:
                return "" if picture else text
            kind = "raw" if picture else "blob"
            return f"{picture}[{text}]({address}/{kind}/v{metadata['version']}/{file}{anchor})"

        text = LINK.sub(absolute, (root / "README.md").read_text("utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
