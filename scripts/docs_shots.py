"""Take pictures of the built site with headless Chromium: `docs_shots.py SITE PICTURES [PAGE ...]`, pages as `guides/own_env.html`.

Each page is taken whole, at widths of a phone, a tablet and a desktop, light and dark, and as PICTURES/PAGE-WIDTH-THEME.png. A page that
scrolls sideways is an error, which names the elements that stick out; boxes with a scroll bar of their own (code, tables) may.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

WIDTHS = (400, 900, 1440)
THEMES = ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MAX_HEIGHT = 16_000  # Chromium repeats a picture's beginning below that
# The elements that end right of the window, and no parent of which scrolls or cuts them.
STICKING_OUT = """() => {
    const limit = document.documentElement.clientWidth
    if (document.documentElement.scrollWidth <= limit) return []
    const is_cut = e => e && (getComputedStyle(e).overflowX != 'visible' || is_cut(e.parentElement))
    return [...document.body.querySelectorAll('*')]
        .filter(e => e.getBoundingClientRect().right > limit + 1 && !is_cut(e.parentElement))
        .map(e => `<${e.tagName.toLowerCase()} class="${e.getAttribute('class') ?? ''}"> ${e.textContent.trim().slice(0, 60)}`)
}"""


def find_browser() -> str:
    """Return Chromium's path."""
    for name in BROWSERS:
        found = shutil.which(name)
        if found:
            return found
    sys.exit("no Chromium: install it (on Debian, apt-get install chromium)")


def take_all(page: Any, site: Path, pictures: Path, names: list[str], suffix: str) -> list[str]:
    """Take the picture of each page in one window, and return what sticks out."""
    wrong = []
    window = dict(page.viewport_size)
    for name in names:
        page.goto((site / name).resolve().as_uri())
        height = min(MAX_HEIGHT, page.evaluate("document.documentElement.scrollHeight"))
        page.set_viewport_size({**window, "height": height})
        target = pictures / f"{name.removesuffix('.html')}-{suffix}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=target)
        page.set_viewport_size(window)
        wrong += [f"{name}, {suffix}: sideways beyond the window: {found}" for found in page.evaluate(STICKING_OUT)]
    return wrong


def main() -> int:
    """Take all pictures. The exit status is 1 if a page scrolls sideways."""
    from playwright.sync_api import sync_playwright

    site, pictures = Path(sys.argv[1]), Path(sys.argv[2])
    names = sys.argv[3:] or sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    sticking: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        for width, theme in ((width, theme) for width in WIDTHS for theme in THEMES):
            page = browser.new_page(color_scheme=theme, viewport={"width": width, "height": 900})
            sticking += take_all(page, site, pictures, names, f"{width}-{theme}")
            page.close()
        browser.close()
    print(*sticking, f"{len(names)} pages at {len(WIDTHS)} widths, light and dark: {pictures}", sep="\n")
    return 1 if sticking else 0


if __name__ == "__main__":
    sys.exit(main())
