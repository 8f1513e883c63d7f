"""Write the README's table of faults, a short form of the one in docs/performance.md: `readme_faults.py --write`.

Without `--write` the exit status is 1 if the README's table is another one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- faults:begin -->", "<!-- faults:end -->"
# Title of an engine in the full table, and in the short one.
ENGINES = {
    "**stepmill** `raise`": "stepmill",
    "Gymnasium `AsyncVectorEnv`": "Gymnasium",
    "SB3 `SubprocVecEnv`": "SB3",
    "TorchRL `ParallelEnv`": "TorchRL",
    "PufferLib, 2 workers": "PufferLib",
}
FAULTS = ("env raises", "worker killed", "env hangs")


def full_table(page: str) -> dict[str, dict[str, str]]:
    """Return the table of a page: engine to fault to what happened."""
    rows = [line.strip("|").split("|") for line in _between(page).splitlines() if line.startswith("|")]
    head = [cell.strip() for cell in rows[0]]
    return {row[0].strip(): dict(zip(head[1:], map(str.strip, row[1:]), strict=True)) for row in rows[2:]}


def _between(text: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    inside, end, _ = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"no {BEGIN} ... {END} in a document that begins with {before[:20]!r}; put both marks back")
    return inside


def shorten(outcome: str) -> str:
    """Return when the caller knows of a fault, and what becomes of the other envs and of `close()`."""
    if outcome.startswith("**never** reported"):
        return "**never** reported"
    when = re.search(r"after ([\d.]+ m?s)", outcome)
    others = "others go on" if "others go on" in outcome else "others lost"
    hangs = ", `close()` hangs" if "**never** closed" in outcome else ""
    return f"{when[1] if when else '?'}, {others}{hangs}"


def short_table(page: str) -> str:
    """Return the short table, four lines and a rule."""
    full = full_table(page)
    rows = [[fault, *(shorten(full[title][fault]) for title in ENGINES)] for fault in FAULTS]
    head = f"| | {' | '.join(ENGINES.values())} |\n|---|{'---|' * len(ENGINES)}\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def rewritten(readme: str, page: str) -> str:
    """Return the README with the short table between its marks."""
    return readme.replace(f"{BEGIN}{_between(readme)}{END}", f"{BEGIN}\n{short_table(page)}{END}")


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8")
    after = rewritten(before, PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        README.write_text(after, encoding="utf-8")
    elif before != after:
        sys.exit("the README's table of faults is out of date; run: python scripts/readme_faults.py --write")
