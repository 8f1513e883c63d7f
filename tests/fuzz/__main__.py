"""Plays many programs, each reproducible from its number, and prints those that fail as Python, shrunk.

Usage: python -m tests.fuzz [--first N] [--programs N] [--backends serial,thread,...] [--max-failures N]
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import logging
import sys
import time

from tests.fuzz.player import play
from tests.fuzz.programs import BACKENDS, Program, draw_program, shrink
from tests.harness.hangs import HANG_GUARD_S

REPORT_EVERY = 1000


def find_failure(number: int, backends: tuple[str, ...] = BACKENDS) -> str | None:
    """Play the program of a number; return a text if something is wrong. A program that hangs ends this process with all stacks."""
    program = draw_program(number, backends)
    first = _failure(program)
    if first is None:
        return None
    smaller = shrink(program, lambda each: _failure(each) is not None)
    text = _failure(smaller) or _failure(program) or f"{first}\nit did not fail again: it depends on timing"
    return f"program {number} of {','.join(backends)}:\n{text}"


def _failure(program: Program) -> str | None:
    faulthandler.dump_traceback_later(3 * HANG_GUARD_S, exit=True)
    try:
        return play(program)
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--max-failures", type=int, default=1)
    chosen = parser.parse_args()
    backends = tuple(chosen.backends.split(","))
    if importlib.util.find_spec("numba") is None:
        backends = tuple(name for name in backends if name != "kernel")
    logging.getLogger("stepmill").setLevel(logging.CRITICAL)
    begun = time.monotonic()
    num_failures = 0
    number = chosen.first
    for number in range(chosen.first, chosen.first + chosen.programs):
        failure = find_failure(number, backends)
        if failure is not None:
            num_failures += 1
            print(failure, flush=True)
        if (number + 1) % REPORT_EVERY == 0 or num_failures >= chosen.max_failures:
            print(f"up to program {number}: {num_failures} failed, {time.monotonic() - begun:.0f} s", flush=True)
        if num_failures >= chosen.max_failures:
            break
    print(f"{number + 1 - chosen.first} programs, {num_failures} failed, {time.monotonic() - begun:.0f} s")
    return int(num_failures > 0)


if __name__ == "__main__":
    sys.exit(main())
