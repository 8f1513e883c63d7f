"""Look up the functions that the model of the protocol says it mirrors; exit status 1 if one of them does not exist.

A comment of model/*.pml names them: `C++: f (file.cpp), g (file.hpp)`, whatever the floor, and `Python: h (package/file.py)`.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "stepmill"
# Definitions begin in the first column, calls do not.
DEFINED = {"C++": r"^\S[^;={{]*\b{name}\(", "Python": r"^\s*def {name}\("}
NAMED = re.compile(r"(C\+\+|Python): ((?:\w+ \([\w/.]+\)(?:, )?)+)")


def named_functions() -> list[tuple[str, str, str]]:
    """Return language, name and file of every function that the model names."""
    found = set()
    for path in (ROOT / "model").glob("*.pml"):
        for language, names in NAMED.findall(path.read_text()):
            found |= {(language, name, file) for name, file in re.findall(r"(\w+) \(([\w/.]+)\)", names)}
    return sorted(found)


def is_defined(language: str, name: str, file: str) -> bool:
    paths = [SOURCES / file] if language == "Python" else list((SOURCES / "_native").rglob(file))
    texts = [path.read_text() for path in paths if path.exists()]
    return any(re.search(DEFINED[language].format(name=name), text, re.MULTILINE) for text in texts)


def main() -> int:
    """Print each name that is not found."""
    named = named_functions()
    missing = [each for each in named if not is_defined(*each)]
    for _, name, file in missing:
        print(f"model: {file} defines no {name}")
    return 1 if missing or not named else 0


if __name__ == "__main__":
    sys.exit(main())
