"""Check the built site: every link to a file of the site leads to a file, and every anchor to an id. Usage: docs_links.py FOLDER."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and ids of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif value and (name == "href" or name == "src"):
                self.links.append(value)


def broken_links(folder: Path) -> list[str]:
    """Return a line for each link of a folder of HTML that leads nowhere."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    problems = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("data:"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                problems.append(f"{path.relative_to(folder.resolve())}: {link} does not exist")
            elif target in pages and unquote(parts.fragment) not in pages[target].ids:
                problems.append(f"{path.relative_to(folder.resolve())}: {link} has no such anchor")
    return sorted(set(problems))


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]))
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(1 if found else 0)
