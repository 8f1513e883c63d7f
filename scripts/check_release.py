"""Check that a release is consistent: `check_release.py v0.2.0`. The publish workflow runs it before it uploads anything.

The tag is the version; CITATION.cff and conda/recipe.yaml have the version; the newest section of CHANGELOG.md is dated and has the version; pyproject.toml
has [project.urls].
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def problems_of(tag: str, root: Path = ROOT) -> list[str]:
    """Return a sentence for each thing that does not fit a release under this tag."""

    def read(name: str) -> str:
        return (root / name).read_text(encoding="utf-8")

    found = re.search(r'__version__ = "([^"]+)"', read("src/stepmill/_version.py"))
    version = found[1] if found else "?"
    section = re.search(r"^## (.*)$", read("CHANGELOG.md"), re.MULTILINE)
    heading = section[1] if section else ""
    problems = []
    if tag != f"v{version}":
        problems.append(f"the tag is {tag}, but src/stepmill/_version.py says {version}: tag v{version}")
    if f"\nversion: {version}\n" not in read("CITATION.cff"):
        problems.append(f"CITATION.cff has another version than {version}")
    if not re.fullmatch(rf"\[?{re.escape(version)}\]? - \d{{4}}-\d\d-\d\d", heading):
        problems.append(f"the newest section of CHANGELOG.md is {heading!r}; it should be '[{version}] - YYYY-MM-DD'")
    if f'\n  version: "{version}"\n' not in read("conda/recipe.yaml"):
        problems.append(f"conda/recipe.yaml has another version than {version}")
    if "[project.urls]" not in read("pyproject.toml"):
        problems.append("pyproject.toml has no [project.urls]; run scripts/release_links.py in the checkout")
    return problems


if __name__ == "__main__":
    problems = problems_of(sys.argv[1])
    sys.stdout.write("".join(f"release: {problem}\n" for problem in problems))
    sys.exit(1 if problems else 0)
