"""What MkDocs does beside its own: the site also has the pages and files of the repository that the
documents link to, at the same paths relative to each other."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# Files that the site takes from outside of `docs/`.
_TAKEN = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "SECURITY.md",
    "examples/**/*.md",
    "examples/**/*.py",
    "examples/**/*.yaml",
    "model_cards/**/*.json",
    "model_cards/**/*.md",
    "model_cards/**/*.svg",
)
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)")
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", flags=re.DOTALL)


def on_files(files: Files, config) -> Files:
    """Add the files from outside of `docs/`."""
    for pattern in _TAKEN:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Point links at the places that files have in the site."""
    uri = page.file.src_uri
    outside = page.file.generated_by is not None
    home = posixpath.dirname(uri if outside else f"docs/{uri}")

    def relinked(match: re.Match) -> str:
        start, target = match.groups()
        if re.match(r"[a-z]+:", target):
            return match.group()
        # the path in the repository, and what of it the site has
        place = posixpath.normpath(posixpath.join(home, target)).removeprefix("docs/")
        if (ROOT / place).is_dir() and not place.endswith(".md"):
            place = next((p for p in (f"{place}/README.md",) if files.get_file_from_path(p)), place)
        if place == "README.md":
            place = "index.md"
        return start + posixpath.relpath(place, posixpath.dirname(uri) or ".")

    return _LINK.sub(relinked, markdown)
