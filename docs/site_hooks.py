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
_LINK = re.compile(r"(?P<start>!?\[(?P<text>[^\]]*)\]\()(?P<target>[^)\s#]+)(?P<end>[^)]*\))")


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
    is_added = page.file.generated_by is not None
    home = posixpath.dirname(uri if is_added else f"docs/{uri}")

    def relinked(match: re.Match) -> str:
        if re.match(r"[a-z]+:", match["target"]):
            return match.group()
        # in the repository
        place = posixpath.normpath(posixpath.join(home, match["target"]))
        if (ROOT / place).is_dir():
            if not (ROOT / place / "README.md").is_file():
                return match["text"]  # a folder has no page
            place = f"{place}/README.md"
        # in the site
        place = "index.md" if place == "README.md" else place.removeprefix("docs/")
        return match["start"] + posixpath.relpath(place, posixpath.dirname(uri) or ".") + match["end"]

    return _LINK.sub(relinked, markdown)
