"""Check the built site: every link to a file of the site leads to a file, and every anchor to an id.

Usage: docs_links.py FOLDER [--online]. With --online every page of another site that a link names is fetched, too.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

TIMEOUT_S = 20.0
NUM_FETCHES = 8
GONE = (404, 410)  # other statuses may mean that a site refuses programs


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


def external_links(folder: Path) -> list[str]:
    """Return the pages of other sites that a folder of HTML links to, without anchors."""
    pages = [Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")]
    links = {link for page in pages for link in page.links if urlsplit(link).scheme in {"http", "https"}}
    return sorted({urldefrag(link).url for link in links})


def dead_links(links: list[str]) -> list[str]:
    """Fetch pages, and return a line for each that does not exist, or whose site does not answer."""
    with ThreadPoolExecutor(NUM_FETCHES) as threads:
        return [problem for problem in threads.map(_fetch, links) if problem]


def _fetch(link: str) -> str:
    request = urllib.request.Request(link, headers={"User-Agent": "stepmill-docs"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"{link}: status {error.code}" if error.code in GONE else ""
    except OSError as error:
        return f"{link}: {error}"


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]))
    if "--online" in sys.argv[2:]:
        found += dead_links(external_links(Path(sys.argv[1])))
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(1 if found else 0)
