"""Section 6: the same faults in stepmill and its peers, each in a separate process that is killed after 15 s.

    python -m benchmarks.faults [--only NAME ...] [--docs]
    python -m benchmarks.faults --check    # fails if the table of docs/performance.md is not that of docs/faults.json

There are four envs, and env 1 raises, hangs, or kills its process in a step. Then the other envs are stepped, and the engine is
closed. Two further scenarios kill the learner, and send Ctrl-C to its process group. Processes that remain are found by an
environment variable that every descendant inherits; files that remain are found in /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.paths import DIENGINE, OURS, PEERS, ROOT, driver_environment, interpreter_of
from benchmarks.readme import replace_block

STORED = ROOT / "docs" / "faults.json"
PAGE = ROOT / "docs" / "performance.md"
LIMIT_S = 15.0  # a process that has not ended by then counts as never ending
START_LIMIT_S = 120.0
SETTLE_S = 0.5  # before CPU time is counted
GONE_S = 5.0  # how long to wait until the descendants of an ended process are gone
TOKEN = "STEPMILL_FAULT_TOKEN"
SHM = Path("/dev/shm")
SCENARIOS = ("raise", "kill", "hang", "parent", "ctrl-c", "wait")
WATCH_S = 1.5  # how long CPU time is counted during a step of 3 s
WIDTH = 120


@dataclass(frozen=True)
class Subject:
    """An engine to test with faults."""

    name: str
    title: str
    adapter: str
    venv: str = PEERS
    options: dict[str, Any] = field(default_factory=dict)


SUBJECTS = (
    Subject("stepmill", "**stepmill** `raise`", "stepmill", OURS, {"on_fault": "raise"}),
    Subject("stepmill-truncate", "**stepmill** `truncate`", "stepmill", OURS, {"on_fault": "truncate"}),
    Subject("stepmill-replay", "**stepmill** `replay`", "stepmill", OURS, {"on_fault": "replay"}),
    Subject("gym-async", "Gymnasium `AsyncVectorEnv`", "gym_async"),
    Subject("sb3", "SB3 `SubprocVecEnv`", "sb3", PEERS, {"start_method": "forkserver"}),
    Subject("tianshou", "Tianshou `ShmemVectorEnv`", "tianshou_venv"),
    Subject("torchrl", "TorchRL `ParallelEnv`", "torchrl_parallel", PEERS, {"start_method": "spawn"}),
    Subject("diengine", "DI-engine subprocess", "diengine", DIENGINE),
    Subject("puffer", "PufferLib, 2 workers", "puffer", PEERS, {"num_workers": 2}),
)


@dataclass
class Outcome:
    """The result of one scenario. None means that it did not get that far.

    Attributes:
        reported_ms: from the fault until the caller has an error or the step's result.
        error: the class of the error that the caller got.
        kept: whether the other envs can be stepped and have lost no step.
        whole_ms: from the fault until the failed env works again, too.
        close_s: the duration of `close()`.
        gone_s: until no process is left.
        cpu_percent: CPU time of all processes during a long step, in percent of a core.
        tracebacks: how many tracebacks were written to stderr.
        left: processes and files that remain.
        failure: why the scenario could not be run.
    """

    reported_ms: float | None = None
    error: str | None = None
    kept: bool | None = None
    whole_ms: float | None = None
    close_s: float | None = None
    gone_s: float | None = None
    cpu_percent: float | None = None
    tracebacks: int = 0
    left: list[str] = field(default_factory=list)
    failure: str | None = None


def run_scenario(subject: Subject, scenario: str) -> Outcome:
    """Run one scenario on one engine in a separate process, and kill all processes that remain."""
    token = secrets.token_hex(8)
    python = interpreter_of(subject.venv)
    if not python.exists():
        return Outcome(failure="not set up")
    before = set(os.listdir(SHM))
    with tempfile.TemporaryDirectory(prefix="stepmill-fault-") as folder:
        command = [
            str(python),
            "-m",
            "benchmarks.fault_victim",
            subject.adapter,
            json.dumps(subject.options),
            scenario,
            folder,
        ]
        with _started(command, token, Path(folder)) as process:
            _wait_until(lambda: "ready" in events(Path(folder)) or process.poll() is not None, START_LIMIT_S)
            if scenario in ("parent", "ctrl-c"):
                outcome = _end_from_outside(process, scenario, token, Path(folder))
            elif scenario == "wait":
                outcome = _count_cpu(token, Path(folder))
            else:
                outcome = _listen(process, Path(folder))
            if scenario != "wait":
                _watch_rest(process, token, before, outcome)
        outcome.tracebacks = (Path(folder) / "err").read_text(errors="replace").count("Traceback (most recent")
    return outcome


@contextmanager
def _started(command: Sequence[str], token: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**driver_environment(), TOKEN: token}
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for pid in descendants(token):
                _kill(pid)
            process.kill()
            process.wait()


def events(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the events that the process has reported so far, by name."""
    lines = (folder / "out").read_text(errors="replace").splitlines()
    reports = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return {report["event"]: report for report in reports if isinstance(report, dict) and "event" in report}


def _listen(process: subprocess.Popen[bytes], folder: Path) -> Outcome:
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    facts = events(folder)
    outcome = Outcome()
    moment = folder / "moment"
    if not moment.exists():
        last = (folder / "err").read_text(errors="replace").strip().splitlines()
        outcome.failure = f"never reached the fault: {last[-1] if last else 'no message'}"
        return outcome
    if "reported" in facts:
        outcome.reported_ms = 1000 * (facts["reported"]["at"] - float(moment.read_text()))
        outcome.error = facts["reported"]["error"]
    if "others" in facts:
        others, others_at = facts["others"], facts["others"]["at"]
        outcome.kept = others["error"] is None and len(others["kept"]) == 3
        if others["error"] is None and others["is_whole"]:
            outcome.whole_ms = 1000 * (others_at - float(moment.read_text()))
    if "closed" in facts:
        outcome.close_s = facts["closed"]["seconds"]
    return outcome


def _end_from_outside(process: subprocess.Popen[bytes], scenario: str, token: str, folder: Path) -> Outcome:
    outcome = Outcome()
    if not _wait_until(lambda: "stepping" in events(folder) or process.poll() is not None, LIMIT_S):
        outcome.failure = "never began to step"
        return outcome
    if process.poll() is not None:
        outcome.failure = "ended by itself"
        return outcome
    start = time.monotonic()
    if scenario == "parent":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    if _wait_until(lambda: process.poll() is not None and not descendants(token), LIMIT_S):
        outcome.gone_s = time.monotonic() - start
    return outcome


def _count_cpu(token: str, folder: Path) -> Outcome:
    """Measure the CPU time of all processes while one env sleeps in a step."""
    if not _wait_until((folder / "moment").exists, LIMIT_S):
        return Outcome(failure="never reached the wait")
    time.sleep(SETTLE_S)
    begin = _cpu_s(token)
    time.sleep(WATCH_S)
    return Outcome(cpu_percent=100 * (_cpu_s(token) - begin) / WATCH_S)


def _cpu_s(token: str) -> float:
    ticks = 0
    for pid in descendants(token):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _watch_rest(process: subprocess.Popen[bytes], token: str, before: set[str], outcome: Outcome) -> None:
    """Record the processes and the shared memory that remain after the process has ended."""
    if process.poll() is None:
        outcome.left.append("the program itself, which hangs")
        return
    _wait_until(lambda: not descendants(token), GONE_S)
    processes = len(descendants(token))
    if processes:
        outcome.left.append(f"{processes} process{'es' if processes > 1 else ''}")
    segments = [name for name in set(os.listdir(SHM)) - before if _is_orphaned(name)]
    outcome.left.extend(f"/dev/shm/{name}" for name in segments)


def _is_orphaned(name: str) -> bool:
    """Whether no process maps a segment any more: other programs on this machine make segments, too."""
    try:
        links = [path for path in Path("/proc").glob("[0-9]*/maps") if name in path.read_text(errors="replace")]
    except OSError:
        return False
    return not links


def descendants(token: str) -> list[int]:
    """Return the processes that inherited the token, without zombies."""
    wanted = f"{TOKEN}={token}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except (OSError, ValueError):
            continue
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def measure(subjects: Sequence[Subject], say: Callable[[str], None]) -> dict[str, dict[str, Outcome]]:
    """Run every scenario on every engine."""
    results: dict[str, dict[str, Outcome]] = {}
    for subject in subjects:
        results[subject.name] = {}
        for scenario in SCENARIOS:
            results[subject.name][scenario] = outcome = run_scenario(subject, scenario)
            say(f"{subject.name} {scenario}: {outcome}")
    return results


def to_block(results: dict[str, dict[str, Outcome]]) -> str:
    """Return the table and its legend."""
    lines = [
        "| | env raises | worker killed | env hangs | learner killed | Ctrl-C | CPU while waiting |",
        "|---|---|---|---|---|---|---|",
    ]
    for subject in SUBJECTS:
        if subject.name in results:
            cells = [_cell(results[subject.name][scenario], scenario) for scenario in SCENARIOS]
            lines.append(f"| {subject.title} | {' | '.join(cells)} |")
    setup = (
        "The program steps four envs, one in each process (PufferLib: two per process), started as each library does by default. One env "
        "fails. Each of the first three cells begins with the time from the fault until the caller gets an error or the result of the "
        "step. If an env hangs, engines with a time limit for a step (stepmill, Gymnasium) have a limit of 1 s."
    )
    terms = [
        "- *Others go on*: the other envs can be stepped, and they have lost no step.",
        "- *Whole*: the time until the failed env works again, too.",
        f"- *Closed*: the duration of `close()`. *Never* means longer than {LIMIT_S:.0f} s.",
        "- *Gone*: the time until no process is left.",
        "- *CPU while waiting*: the CPU time of all processes while one env sleeps in a step, in percent of one core.",
    ]
    origin = (
        "These are single runs on a shared machine, so only the orders of magnitude are significant. To make the table, run "
        "`make bench-setup`, then `python -m benchmarks.faults --docs`."
    )
    return "\n".join([*lines, "", _fill(setup), "", *map(_fill, terms), "", _fill(origin)]) + "\n"


def _fill(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _cell(outcome: Outcome, scenario: str) -> str:
    if outcome.failure is not None:
        return outcome.failure
    left = f"; left: {', '.join(outcome.left)}" if outcome.left else ""
    if scenario == "wait":
        return "–" if outcome.cpu_percent is None else f"{outcome.cpu_percent:.1f} %"
    if scenario in ("parent", "ctrl-c"):
        late = "**never** gone" if outcome.left else f"gone after over {LIMIT_S:.0f} s"
        gone = late if outcome.gone_s is None else f"gone after {_seconds(outcome.gone_s)}"
        traces = f", {outcome.tracebacks} tracebacks" if scenario == "ctrl-c" and outcome.tracebacks > 1 else ""
        return f"{gone}{traces}{left}"
    if outcome.reported_ms is None:
        return f"**never** reported{left}"
    how = outcome.error or "result"
    others = "others go on" if outcome.kept else "others lost"
    if outcome.whole_ms is not None:
        others += f", whole after {_seconds(outcome.whole_ms / 1000)}"
    closed = "**never** closed" if outcome.close_s is None else f"closed in {_seconds(outcome.close_s)}"
    return f"{how} after {_seconds(outcome.reported_ms / 1000)}; {others}; {closed}{left}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def load(path: Path) -> dict[str, dict[str, Outcome]]:
    """Read the results of earlier runs, if there are any."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    return {name: {key: Outcome(**facts) for key, facts in row.items()} for name, row in stored.items()}


def store(results: dict[str, dict[str, Outcome]], path: Path) -> None:
    """Write results into a file that `load` reads."""
    plain = {name: {key: _known(outcome) for key, outcome in row.items()} for name, row in results.items()}
    path.write_text(json.dumps(plain, indent=1) + "\n")


def _known(outcome: Outcome) -> dict[str, Any]:
    rounded = {
        key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in vars(outcome).items()
    }
    return {key: value for key, value in rounded.items() if value is not None and value != []}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--only", nargs="*", choices=[subject.name for subject in SUBJECTS], help="run only these engines"
    )
    parser.add_argument(
        "--docs", action="store_true", help="write docs/faults.json, and the table of docs/performance.md"
    )
    parser.add_argument(
        "--check", action="store_true", help="run nothing; fail if that table is not the one of docs/faults.json"
    )
    chosen = parser.parse_args(arguments)
    page = PAGE.read_text()
    if chosen.check:
        if page != replace_block(page, "faults", to_block(load(STORED))):
            sys.exit(
                f"{PAGE.name} has another table of faults than {STORED.name}; run `python -m benchmarks.faults --docs`"
            )
        return
    subjects = [subject for subject in SUBJECTS if not chosen.only or subject.name in chosen.only]
    results = measure(subjects, lambda line: print(line, file=sys.stderr, flush=True))
    results = {**load(STORED), **results}  # rows of earlier runs are kept
    print(to_block(results))
    if chosen.docs:
        store(results, STORED)
        PAGE.write_text(replace_block(page, "faults", to_block(results)))


if __name__ == "__main__":
    main()
