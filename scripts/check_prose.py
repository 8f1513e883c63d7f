"""Check the spelling of all files, refuse the words and phrases that scripts/prose.ini bans, and front-ends that are not described.

Spelling is checked by codespell. Banned phrases are regular expressions, matched line by line without regard to case.
"""

import configparser
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "scripts" / "prose.ini"
GENERATED = ("constraints.txt", "src/stepmill/_native.pyi", "tests/unit/public_api.txt")

FRONT_ENDS = "src/stepmill/frontends/"
PARTS_OF_FRONT_ENDS = {"__init__", "batch_rows", "env_objects", "overrides", "pool_options", "rollout", "starting_pool"}
PLACES_OF_FRONT_ENDS = (
    "CHANGELOG.md",
    "README.md",
    "docs/index.md",
    "scripts/docs_api.py",
    "scripts/public_api.py",
    "tests/typing/front_ends.py",
    "scripts/check_extras.py",  # of those with an extra
)
# Gymnasium is always installed; ray_rollout has the extra of the backend; the others are used with the versions that a project has.
WITHOUT_EXTRA = {"gymnasium", "ray_rollout", "alf", "di_engine", "mlagents", "multi_env"}


@dataclass(frozen=True)
class Rules:
    """The content of prose.ini: accepted words, banned patterns with advice, and paths whose phrases are not checked."""

    accepted: tuple[str, ...]
    banned: Mapping[re.Pattern[str], str]
    unchecked: tuple[str, ...]


def read_rules(text: str) -> Rules:
    parser = configparser.RawConfigParser(delimiters=("=>",), comment_prefixes=("#",), allow_no_value=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # keys are patterns and keep their case
    parser.read_string(text)
    banned = {re.compile(pattern, re.IGNORECASE): advice for pattern, advice in parser.items("banned")}
    return Rules(tuple(parser.options("accepted")), banned, tuple(parser.options("unchecked")))


def find_banned(text: str, banned: Mapping[re.Pattern[str], str]) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, the words found, advice) for each banned phrase."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, advice in banned.items():
            found = pattern.search(line)
            if found:
                yield number, found[0], advice


def is_unchecked(name: str, unchecked: Sequence[str]) -> bool:
    """Return whether a path is one of the unchecked paths or lies below one."""
    return any(name == path or name.startswith(f"{path}/") for path in unchecked)


def find_files() -> list[str]:
    """Return the text files that git does not ignore, as paths relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    names = sorted({name for name in listed.split("\0") if name} - {*GENERATED})
    return [name for name in names if (ROOT / name).is_file() and b"\0" not in (ROOT / name).read_bytes()]


def misspelt(names: Sequence[str], accepted: Sequence[str]) -> list[str]:
    """Return what codespell reports, one line per word."""
    words = ",".join(word.lower() for word in accepted)
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words-list", words, *names]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.splitlines()


def undescribed(names: Sequence[str], read: Callable[[str], str]) -> list[str]:
    """Return what front-ends lack: a page of the documents that names it, an extra, an entry of the changelog.

    Args:
        names: of all files.
        read: returns the text of one.
    """
    found = {
        name[len(FRONT_ENDS) :].partition("/")[0].removesuffix(".py") for name in names if name.startswith(FRONT_ENDS)
    }
    pages = [name for name in names if name.startswith("docs/") and name.endswith(".md") and "/decisions/" not in name]
    text = "".join(read(name) for name in pages)
    extras = read("pyproject.toml").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    problems = []
    for name in sorted(found - PARTS_OF_FRONT_ENDS):
        extra = name.replace("_", "-")
        if f"docs/switching/{name}.md" not in pages and f"stepmill.frontends.{name}" not in text:
            problems.append(f"docs/switching/{name}.md: there is no page for the front-end {name}")
        if name not in WITHOUT_EXTRA and f"\n{extra} = [" not in extras:
            problems.append(f"pyproject.toml: there is no extra {extra} for the front-end {name}")
        places = PLACES_OF_FRONT_ENDS if extra in extras else PLACES_OF_FRONT_ENDS[:-1]
        silent = [place for place in places if not re.search(rf"\b{name}\b", read(place), re.IGNORECASE)]
        problems += [f"{place}: does not name the front-end {name}" for place in silent]
    return problems


def main() -> int:
    """Print each misspelt word and each banned phrase. The exit status is 1 if there is one."""
    rules = read_rules(RULES.read_text(encoding="utf-8"))
    names = find_files()
    problems = misspelt(names, rules.accepted)
    problems += undescribed(names, lambda name: (ROOT / name).read_text(encoding="utf-8"))
    rules_name = str(RULES.relative_to(ROOT))
    for name in names:
        if name == rules_name or is_unchecked(name, rules.unchecked):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        problems += [f"{name}:{line}: {found!r}: {advice}" for line, found, advice in find_banned(text, rules.banned)]
    print("\n".join([*problems, f"prose: {len(problems)} problems" if problems else "prose: no problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
