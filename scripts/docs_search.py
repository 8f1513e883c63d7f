"""Check that the search of the built site finds the FAQ first: `docs_search.py SITE`. It needs Chromium."""

from __future__ import annotations

import sys
from pathlib import Path

from docs_shots import find_browser

WORDS = ("sb3", "seed", "timeout", "kill", "callback")
PAGE = "Frequently asked questions"
NUM_FIRST = 3


def main() -> int:
    """Search for each word with the site's own script. The exit status is 1 if the page is not among the first results."""
    from playwright.sync_api import sync_playwright

    search = (Path(sys.argv[1]) / "search.html").resolve().as_uri()
    missed = False
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        page = browser.new_page()
        for word in WORDS:
            page.goto(f"{search}?q={word}")
            page.wait_for_function("document.querySelector('.search-summary')?.textContent.includes('found')")
            links = page.eval_on_selector_all("#search-results ul.search li > a", "all => all.map(a => a.textContent)")
            print(f"{word}: {', '.join(links[:NUM_FIRST])}")
            missed |= PAGE not in links[:NUM_FIRST]
        browser.close()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
