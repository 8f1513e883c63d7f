"""Check the protocol's model with spin, in bounds, and then that each mutant of it fails: `make model`.

runs.py ── bounds, mutants ──► spin -a ──► cc ──► pan, in build/model/<name>/, two at a time ──► a table on stdout

Exit status: 0 all as it should be · 1 the model fails, or a mutant passes · 2 a tool is missing, or a search was cut short.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from runs import BOUNDS, EQUIVALENTS, MUTANTS

HERE = Path(__file__).resolve().parent
WORK = HERE.parent / "build" / "model"
MEMORY_MIB = 8000
MAX_DEPTH = 20_000
TIMEOUT_S = 900
TOOLS = {"spin": "apt-get install -y spin", "cc": "apt-get install -y gcc"}
# Exact: no hash compaction, no bit states. COLLAPSE stores parts of states once.
PAN_FLAGS = ("-O1", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}")
# Looks for executions that never end, instead of for errors of safety.
CYCLE_FLAGS = ("-O1", "-w", "-DNP", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}")


@dataclass(frozen=True)
class Run:
    """One search: the model in some bounds, perhaps mutated."""

    name: str
    flags: tuple[str, ...]
    must_fail: bool
    is_cycle_search: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a search found: the first error, or "" if there is none; and how far it got."""

    run: Run
    error: str
    num_states: int
    elapsed_s: float
    is_complete: bool

    @property
    def verdict(self) -> str:
        if not self.is_complete and not self.error:
            return "CUT SHORT"
        if self.run.must_fail:
            return "fails, as it must" if self.error else "PASSES, BUT MUST FAIL"
        return "FAILS" if self.error else "holds"

    @property
    def is_good(self) -> bool:
        return bool(self.error) if self.run.must_fail else self.is_complete and not self.error


def all_runs() -> list[Run]:
    """List every search: the long ones first, so that two cores end at about the same time."""
    model = [Run(name, bounds.flags, must_fail=False) for name, bounds in BOUNDS.items() if not bounds.is_for_mutants]
    cycles = [
        Run(f"{name}, endless", bounds.flags, must_fail=False, is_cycle_search=True)
        for name, bounds in BOUNDS.items()
        if bounds.is_cycle_search
    ]
    equals = [
        Run(f"{name} in {bounds}", (*BOUNDS[bounds].flags, f"-D{name}"), must_fail=False)
        for name, (bounds, _) in EQUIVALENTS.items()
    ]
    mutants = [Run(name, (*BOUNDS[bounds].flags, f"-D{name}"), must_fail=True) for name, (bounds, _) in MUTANTS.items()]
    return [*model, *cycles, *equals, *mutants]


def search(run: Run) -> Outcome:
    """Make the searcher of a run in a directory of its own, and run it."""
    began = time.monotonic()
    place = WORK / re.sub(r"\W+", "_", run.name)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    _call(["spin", "-a", *run.flags, str(HERE / "wake.pml")], place)
    _call(["cc", *(CYCLE_FLAGS if run.is_cycle_search else PAN_FLAGS), "-o", "pan", "pan.c"], place)
    said = _call(["./pan", f"-m{MAX_DEPTH}", *(["-l"] if run.is_cycle_search else [])], place)
    (place / "said.txt").write_text(said)
    return read(run, said, time.monotonic() - began)


def _call(command: Sequence[str], place: Path) -> str:
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    said = done.stdout + done.stderr
    if done.returncode != 0 or re.search(r"spin: .*Error", said):
        raise RuntimeError(f"{' '.join(command)} failed in {place}:\n{said[-2000:]}")
    return said


def read(run: Run, said: str, elapsed_s: float) -> Outcome:
    """Understand what pan says."""
    errors = re.search(r"errors: (\d+)", said)
    states = re.search(r"([\d.e+]+) states, stored", said)
    first = re.search(r"^pan:1: (.*?) \(at depth", said, re.MULTILINE)
    is_cut = any(sign in said for sign in ("max search depth too small", "out of memory", "reached -DMEMLIM"))
    error = first.group(1) if first is not None else ""
    if errors is None or (errors.group(1) != "0") != bool(error):
        raise RuntimeError(f"pan cannot be understood, of {run.name}:\n{said[-2000:]}")
    return Outcome(run, error, int(float(states.group(1))) if states else 0, elapsed_s, is_complete=not is_cut)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def show(outcome: Outcome) -> None:
    """Print one line of the table."""
    error = outcome.error if len(outcome.error) < 60 else outcome.error[:57] + "..."
    say(
        f"{outcome.run.name:<28} {outcome.verdict:<22} {outcome.num_states:>11,} states {outcome.elapsed_s:>6.1f} s  {error}"
    )


def tell_how_to_replay(outcome: Outcome) -> None:
    """Print what shows the execution that leads to an error."""
    place = WORK / re.sub(r"\W+", "_", outcome.run.name)
    say(f"  cd {place} && spin -t -p -g -k wake.pml.trail {' '.join(outcome.run.flags)} {HERE / 'wake.pml'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="of bounds or mutants; all if none is given")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="searches at a time")
    options = parser.parse_args()
    for tool, command in TOOLS.items():
        if shutil.which(tool) is None:
            sys.stderr.write(f"{tool} is not installed, so the model cannot be checked; install it with: {command}\n")
            return 2
    runs = [run for run in all_runs() if not options.names or run.name.split()[0].rstrip(",") in options.names]
    bad: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(search, runs):
            show(outcome)
            if not outcome.is_good:
                bad.append(outcome)
    for outcome in bad:
        tell_how_to_replay(outcome)
    num_mutants = sum(run.must_fail for run in runs)
    say(f"{len(runs)} searches, {num_mutants} of them mutants; {len(bad)} not as they should be")
    if any(outcome.verdict == "CUT SHORT" for outcome in bad):
        return 2
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
