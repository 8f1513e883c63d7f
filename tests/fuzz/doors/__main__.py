"""Plays many programs of the doors, each reproducible from its number, and prints those that fail.

Usage: python -m tests.fuzz.doors [--first N] [--programs N] [--doors evaluations,leases,vectors]
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

from tests.fuzz.doors import evaluations, leases, vectors
from tests.harness.hangs import HANG_GUARD_S

DOORS = {"evaluations": evaluations.play, "leases": leases.play, "vectors": vectors.play}


def find_failure(door: str, number: int) -> str | None:
    """Play a program; return a text if something is wrong. A program that hangs ends this process with all stacks."""
    faulthandler.dump_traceback_later(3 * HANG_GUARD_S, exit=True)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            DOORS[door](number, Path(folder))
    except Exception:
        again = f"python -m tests.fuzz.doors --doors {door} --first {number} --programs 1"
        return f"{traceback.format_exc()}\nagain: {again}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--programs", type=int, default=2000, help="of each door")
    parser.add_argument("--doors", default=",".join(DOORS))
    chosen = parser.parse_args()
    logging.getLogger("stepmill").setLevel(logging.CRITICAL)
    failures = [
        failure
        for door in chosen.doors.split(",")
        for number in range(chosen.first, chosen.first + chosen.programs)
        if (failure := find_failure(door, number)) is not None
    ]
    print("\n".join([*failures[:3], f"{chosen.programs} programs of {chosen.doors}, {len(failures)} failed"]))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
