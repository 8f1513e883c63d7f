"""Look at the includes of src/stepmill/_native: a floor includes itself and floors below it; exit status 1 if one does not.

Names of files are unique, so that pages and comments need no floor.
"""

import re
import sys
from collections import Counter
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent / "src" / "stepmill" / "_native"
BELOW = {
    "shared": set(),
    "codec": {"shared"},
    "worker": {"shared", "codec"},
    "kernel": {"shared", "codec"},
    "relay": {"shared", "codec"},
    "pool": {"shared", "codec", "worker", "kernel"},
}
BESIDE = "../include/stepmill_kernel.h"  # a user's header


def main() -> int:
    """Print each include and each name that breaks a rule."""
    paths = [path for path in NATIVE.rglob("*") if path.is_file()]
    names = Counter(path.name for path in paths)
    wrong = [f"{name}: {count} files have this name" for name, count in names.items() if count > 1]
    for path in paths:
        floor = path.parent.name
        allowed = {*BELOW.get(floor, BELOW), floor}  # bindings, beside the floors, may include everything
        includes = re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8"))
        above = [each for each in includes if each != BESIDE and (Path(each).parent.name or NATIVE.name) not in allowed]
        wrong += [f"{floor}/{path.name} includes {each}" for each in above]
    print("\n".join(f"check_floors: {line}" for line in wrong) or f"check_floors: {len(paths)} files")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
