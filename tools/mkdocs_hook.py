"""A hook of mkdocs. The same markdown is read on GitHub and in the site; what differs is settled here, while the site is built.

Links out of docs/ (../README.md, ../examples/own_loop.py) lead to pages that hold those files, so that the site is whole without
a network. Patterns in the navigation are the files they match. Inside code in tables GitHub wants `\\|`, Python's markdown `|`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PREFIX = "repository/"
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
NAMED = re.compile(r"\[([\w./-]+\.md)\]\(([^)\s#]+\.md)")
"""A link whose text is the name of a file: on the site its title stands there."""
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml"}


def expanded(nav: Any, docs: Path = ROOT / "docs") -> Any:
    """The navigation with every pattern replaced by the files it matches."""
    if isinstance(nav, dict):
        return {title: expanded(item, docs) for title, item in nav.items()}
    if isinstance(nav, list):
        return [item for entry in nav for item in (_matches(entry, docs) if _is_pattern(entry) else [expanded(entry, docs)])]
    return nav


def _is_pattern(entry: Any) -> bool:
    return isinstance(entry, str) and "*" in entry


def _matches(pattern: str, docs: Path) -> list[str]:
    return sorted(path.relative_to(docs).as_posix() for path in docs.glob(pattern))


def pages_in(nav: Any) -> list[str]:
    """The files that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    return [page for item in (nav.values() if isinstance(nav, dict) else nav) for page in pages_in(item)]


def place(uri: str) -> str:
    """Where a page of the site lies in the repository."""
    return _plain(uri.removeprefix(PREFIX)) if uri.startswith(PREFIX) else f"docs/{uri}"


def _plain(path: str) -> str:
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def uri_of(path: str) -> str:
    """Where a file of the repository lies in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PREFIX + (path if path.endswith(".md") else f"{path}.md")


def targets(markdown: str, path: str) -> dict[str, str]:
    """Relative links of a file of the repository, and which files they lead to."""
    found = {}
    for _, link, _, _ in LINK.findall(markdown):
        if link and "://" not in link and not link.startswith(("mailto:", "/")):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
            found[link] = f"{target}/README.md" if (ROOT / target / "README.md").is_file() else target
    return found


def title(path: str) -> str:
    """The heading of a document of the repository."""
    found = (
        re.search(r"^# (.+)$", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE) if (ROOT / path).is_file() else None
    )
    return found[1] if found else ""


def rewritten(markdown: str, uri: str) -> str:
    """The page with links as the site needs them; what stands in blocks of code is not touched."""
    path = place(uri)
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    for i in range(0, len(parts), 2):
        there = targets(parts[i], path)

        def lead(match: re.Match[str], there: dict[str, str] = there) -> str:
            target = there.get(match[2])
            if target is None or (ROOT / target).is_dir():
                return match[0]
            new = posixpath.relpath(uri_of(target), posixpath.dirname(uri) or ".")
            return f"{match[1]}{new}{match[3] or ''}{match[4]}"

        parts[i] = NAMED.sub(lambda match, there=there: f"[{title(there[match[2]]) or match[1]}]({match[2]}", parts[i])
        parts[i] = LINK.sub(lead, parts[i])
        parts[i] = re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), parts[i])
    return "".join(parts)


def outside() -> dict[str, str]:
    """Pages for the files outside of docs/ that are linked to, and for those that these link to."""
    queue = sorted((ROOT / "docs").rglob("*.md"))
    made: dict[str, str] = {}
    while queue:
        path = queue.pop(0)
        for target in targets(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()).values():
            file = ROOT / target
            if target.startswith(("docs/", "..")) or not file.is_file() or uri_of(target) in made:
                continue
            text = file.read_text(encoding="utf-8")
            if file.suffix == ".md":
                queue.append(file)
            else:
                text = f"# {target}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n"
            made[uri_of(target)] = f"---\nsearch:\n  exclude: true\n---\n\n{text}"
    return made


def on_config(config: Any) -> Any:
    config.nav = expanded(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for uri, content in outside().items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return rewritten(markdown, page.file.src_uri)
