"""Whole training programs, with each class that their library offers and with stepmill's: `python -m benchmarks.programs [PROGRAM ...]`.

    python -m benchmarks.programs [PROGRAM ...] [--seeds 3] [--docs]    # all programs: about an hour on a quiet machine
    python -m benchmarks.programs --short                               # a few steps of each, to see that it runs
    python -m benchmarks.programs --docs --from FILE.json ...           # the tables from several runs; later files take precedence

Each run is a process of Python, from its start to its end. The programs of SB3, Tianshou and TorchRL are in `benchmarks.program_child`; those
of CleanRL, RL Zoo and skrl are their own (`benchmarks.program_texts`), in the environment that `python -m benchmarks.setup --only programs`
makes. The classes of a program take turns, with several seeds. A run counts only if other processes used less than 3 % of the machine
meanwhile, and the command waits until that is so. OMP_NUM_THREADS is what it is in the environment of this command.

Prints the table, and writes the raw results to benchmarks/results after each run; with `--docs` also to docs/programs.json, and the table to
docs/programs.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import cpu, program_tables
from benchmarks.machine import describe
from benchmarks.paths import RESULTS, ROOT, interpreter_of, user_environment
from benchmarks.program_tables import OURS, PROGRAMS, Run

BUSY_SHARE = 0.03  # of the machine, by other processes
QUIET_S = 2.0
WAIT_S = 600.0  # for a quiet machine; after that, runs count, and the table says so
MAX_REPEATS = 3
LIMIT_S = 900


def wait_until_quiet() -> bool:
    """Wait until other processes use little of the machine. Return False if they do not in WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        before = cpu.read(os.getpid())
        time.sleep(QUIET_S)
        if cpu.foreign_share(before, cpu.read(os.getpid())) <= BUSY_SHARE:
            return True
    return False


def run_once(name: str, engine: str, seed: int, steps: int) -> Run:
    """Run a program to its end, in an empty folder."""
    program = PROGRAMS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        arguments, path = program.command(name, engine, seed, steps, folder)
        command = [str(interpreter_of(program.venv)), "-W", "ignore", *arguments]
        env = {
            **user_environment(),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *path]),
            "PROGRAM_BEGUN_S": repr(time.time()),
        }
        before, begin_s = cpu.read(os.getpid()), time.monotonic()
        done = subprocess.run(
            command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        whole_s, others = time.monotonic() - begin_s, cpu.foreign_share(before, cpu.read(os.getpid()))
    if done.returncode:
        raise SystemExit(f"{name} with {engine} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    parts = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"start_s"')))
    return Run(name, engine, seed, whole_s, **parts, others=others)


def measure(name: str, seeds: int) -> Iterator[Run]:
    """Yield the runs of all classes of a program, in turns. A run beside load is repeated."""
    engines = [*PROGRAMS[name].engines, OURS]
    turns = [(seed, engine) for seed in range(1, seeds + 1) for engine in (engines if seed % 2 else reversed(engines))]
    for seed, engine in turns:
        for _ in range(MAX_REPEATS):
            wait_until_quiet()
            run = run_once(name, engine, seed, PROGRAMS[name].steps)
            if run.others <= BUSY_SHARE:
                break
        say(run)
        yield run


def say(run: Run) -> None:
    about = f"{run.whole_s:.1f} s, others {run.others:.0%}, learned {run.learned}"
    print(f"{run.program} {run.engine} seed {run.seed}: {about}", file=sys.stderr, flush=True)


def run_short(names: Sequence[str]) -> int:
    """Run a few steps of programs with each class. The exit status is 1 if a class learned something else than the others."""
    differ = []
    for name in names:
        runs = [run_once(name, engine, 1, PROGRAMS[name].few_steps) for engine in (*PROGRAMS[name].engines, OURS)]
        for run in runs:
            say(run)
        differ += [name] if len({run.learned for run in runs}) > 1 else []
    print(f"different weights: {', '.join(differ)}" if differ else "the same weights with each class")
    return int(bool(differ))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(PROGRAMS)}; none is all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="a few steps of each class")
    parser.add_argument("--docs", action="store_true", help="write the results and the table into docs")
    parser.add_argument("--check", action="store_true", help="fail if the table of docs is not that of its results")
    parser.add_argument("--from", nargs="+", type=Path, help="results of earlier runs, instead of running the programs")
    given = parser.parse_args()
    names = given.programs or list(PROGRAMS)
    if given.check:
        if stale := program_tables.is_stale():
            print(
                "docs/programs.md has another table than docs/programs.json; run `python -m benchmarks.programs --docs`"
            )
        return int(stale)
    if given.short:
        return run_short(names)
    files = vars(given)["from"]
    if files:
        results = program_tables.merge([json.loads(file.read_text(encoding="utf-8")) for file in files])
    else:
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / f"programs-{time.strftime('%Y%m%dT%H%M%S')}.json"
        results = {"machine": describe(), "runs": []}
        for name in names:
            for run in measure(name, given.seeds):
                results["runs"].append(asdict(run))
                file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if given.docs:
        program_tables.write(results)
    print(program_tables.to_block(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
