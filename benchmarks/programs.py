"""Whole training programs, with each class that their library offers and with stepmill's: `python -m benchmarks.programs [PROGRAM ...]`.

Each run is a process of `benchmarks.program_child`, from its start to its end. The classes of a program take
turns, with several seeds. A run counts only if other processes used less than 3 % of the machine meanwhile, and the command waits until
that is so. Prints a table for docs/programs.md, and writes the raw results to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import cpu
from benchmarks.machine import as_markdown, describe
from benchmarks.paths import ROOT, interpreter_of
from benchmarks.program_child import PROGRAMS

BUSY_SHARE = 0.03  # of the machine, by other processes
QUIET_S = 2.0
WAIT_S = 600.0  # for a quiet machine; after that, runs count, and the table says so
MAX_REPEATS = 3


@dataclass(frozen=True)
class Run:
    """One run: seconds of the whole and of its parts, what was learned, and the share of the machine that others used."""

    program: str
    engine: str
    seed: int
    whole_s: float
    start_s: float
    rollout_s: float
    learner_s: float
    learned: str
    others: float


def wait_until_quiet() -> bool:
    """Wait until other processes use little of the machine. Return False if they do not in WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        before = cpu.read(os.getpid())
        time.sleep(QUIET_S)
        if cpu.foreign_share(before, cpu.read(os.getpid())) <= BUSY_SHARE:
            return True
    return False


def run_timed(
    command: Sequence[str], timeout_s: float, env: Mapping[str, str], folder: Path | None = None
) -> tuple[str, float, float]:
    """Run a command. Return its stdout, its seconds, and the share of the machine that other processes used meanwhile."""
    before, begin_s = cpu.read(os.getpid()), time.monotonic()
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=timeout_s)
    whole_s, others = time.monotonic() - begin_s, cpu.foreign_share(before, cpu.read(os.getpid()))
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout, whole_s, others


def run_once(python: Path, program: str, engine: str, seed: int) -> Run:
    """Run a program to its end."""
    command = [str(python), "-W", "ignore", "-m", "benchmarks.program_child", program, engine, str(seed)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PROGRAM_BEGUN_S": repr(time.time())}
    stdout, whole_s, others = run_timed(command, 900, env)
    parts: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return Run(program, engine, seed, whole_s, **parts, others=others)


def measure(python: Path, program: str, seeds: int) -> Iterator[Run]:
    """Yield the runs of all classes of a program, in turns. A run beside load is repeated."""
    engines = PROGRAMS[program][0]
    turns = [(seed, engine) for seed in range(1, seeds + 1) for engine in (engines if seed % 2 else reversed(engines))]
    for seed, engine in turns:
        for _ in range(MAX_REPEATS):
            wait_until_quiet()
            run = run_once(python, program, engine, seed)
            if run.others <= BUSY_SHARE:
                break
        about = f"{run.whole_s:.1f} s, others {run.others:.0%}"
        print(f"{program} {engine} seed {seed}: {about}", file=sys.stderr, flush=True)
        yield run


def rows(runs: list[Run]) -> Iterator[str]:
    """Yield the rows of the table, with medians over the seeds, and the speed of stepmill's class relative to the best other."""
    yield "| program | class | start | rollouts | learner | whole | stepmill's gain | same weights |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for program in dict.fromkeys(run.program for run in runs):
        medians = {
            engine: {
                part: statistics.median(
                    getattr(run, part) for run in runs if (run.program, run.engine) == (program, engine)
                )
                for part in PARTS
            }
            for engine in PROGRAMS[program][0]
        }
        best = min(each["whole_s"] for engine, each in medians.items() if engine != "stepmill")
        for engine, each in medians.items():
            learned = [
                {run.learned for run in runs if (run.program, run.seed) == (program, seed)}
                for seed in {run.seed for run in runs}
            ]
            ends = (
                f"{best / each['whole_s']:.2f} | {sum(len(found) == 1 for found in learned)} of {len(learned)} seeds"
                if engine == "stepmill"
                else " | "
            )
            yield f"| {program} | {engine} | " + " | ".join(f"{each[part]:.1f}" for part in PARTS) + f" | {ends} |"
    loudest = max(run.others for run in runs)
    yield f"\nSeconds, medians. Other processes used at most {loudest:.0%} of the machine in a run."


PARTS = ("start_s", "rollout_s", "learner_s", "whole_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(PROGRAMS)}; none is all")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    python, runs = interpreter_of("frontends"), list[Run]()
    for program in given.programs or PROGRAMS:
        runs += measure(python, program, given.seeds)
    facts = describe()
    results = ROOT / "benchmarks" / "results" / f"programs-{time.strftime('%Y%m%dT%H%M%S')}.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(
        json.dumps({"machine": facts, "runs": [asdict(run) for run in runs]}, indent=1), encoding="utf-8"
    )
    print(*as_markdown(facts), "", *rows(runs), sep="\n")


if __name__ == "__main__":
    main()
