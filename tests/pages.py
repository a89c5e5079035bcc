"""The pages of the documentation, and the code that stands on them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# What one who uses the library reads, the README first.
GUIDE = [README, *sorted((ROOT / "gradstats/docs").glob("*.md"))]
PAGES = [*GUIDE, ROOT / "benchmarks" / "README.md", ROOT / "tests" / "zoo" / "README.md"]


def blocks(page: Path, language: str = "python") -> list[str]:
    """Return the code blocks of a page that are marked as of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def page_with(text: str) -> Path:
    """Return the one page of the guide that holds a text."""
    (page,) = [page for page in GUIDE if text in page.read_text()]
    return page
