"""`stepmill doctor`: looks for problems that make an env slow, wrong or fragile in a pool.

    diagnose(env_fn) ──► one child process per group of checks (doctor_probe.py) ──► Finding, Finding, ... ──► text or JSON

Each group runs in a separate process, so that an env that crashes or hangs is a finding and does not end the diagnosis.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import IO, cast

import cloudpickle

from stepmill.spec.errors import UsageError

GROUPS = ("steps", "seeds", "backends", "forks")
NUM_STEPS = 10_000
LIMIT_S = 120.0  # after which the env of a group counts as hung
STEPS_BUDGET_S = 30.0  # after which the long run of steps ends if the env is slow


class Severity(Enum):
    """How bad a finding is. Notes do not change the exit status: they concern a backend or a start method that is not the default."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One problem of an env.

    Attributes:
        check: the name of the check, for programs.
        what: a description of the problem.
        where: the call, the step or the backend with the problem.
        cure: what to do.
    """

    check: str
    severity: Severity
    what: str
    where: str
    cure: str


@dataclass
class Diagnosis:
    """All findings about one env, and the groups of checks that were made."""

    env: str
    findings: list[Finding] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        """Whether there are only notes."""
        return all(finding.severity is Severity.NOTE for finding in self.findings)

    def to_json(self) -> str:
        """Return the diagnosis as one JSON object."""
        findings = [{**asdict(finding), "severity": finding.severity.value} for finding in self.findings]
        about = {"env": self.env, "is_healthy": self.is_healthy, "checks": self.groups, "findings": findings}
        return json.dumps(about, indent=2)

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.env}: nothing found ({', '.join(self.groups)})"
        lines = [f"{self.env}: {len(self.findings)} found"]
        for each in self.findings:
            lines += [
                f"  {each.severity.value:<8} {each.check}: {each.what}",
                f"           where: {each.where}",
                f"           cure:  {each.cure}",
            ]
        return "\n".join(lines)


def diagnose(
    env_fn: Callable[[], object],
    *,
    name: str = "env",
    num_steps: int = NUM_STEPS,
    limit_s: float = LIMIT_S,
    groups: Sequence[str] = GROUPS,
    on_group: Callable[[str], None] = lambda _group: None,
) -> Diagnosis:
    """Check an env, in child processes, and return what was found.

    Args:
        env_fn: a function that builds the env. It is called several times in each child.
        name: the name of the env, for the report.
        num_steps: the number of steps of the search for leaks.
        limit_s: seconds after which a group of checks is ended, because the env hangs.
        groups: which checks to make.
        on_group: called with the name of each group before it begins.
    Raises:
        UsageError: a group does not exist.
    """
    unknown = sorted({*groups} - {*GROUPS})
    if unknown:
        raise UsageError(f"there are no checks {unknown}; choose from {', '.join(GROUPS)}")
    diagnosis = Diagnosis(name)
    try:
        pickled = cloudpickle.dumps(env_fn)
    except Exception as error:  # the user's objects may raise anything
        diagnosis.findings.append(_unpicklable(error))
        return diagnosis
    for group in groups:
        if group == "backends" and any(finding.check == "non-deterministic" for finding in diagnosis.findings):
            continue  # the data of two runs differ on one backend already
        on_group(group)
        found = list(_run_group(group, pickled, num_steps, limit_s))
        diagnosis.groups.append(group)
        known = {finding.check for finding in diagnosis.findings}
        diagnosis.findings += [finding for finding in found if finding.check not in known]
        if any(finding.check in ("crashes", "hangs", "raises", "not-checked") for finding in found):
            break  # the other groups would find the same
    return diagnosis


def _unpicklable(error: Exception) -> Finding:
    return Finding(
        "unpicklable-factory",
        Severity.ERROR,
        f"the function that makes the env cannot be pickled: {type(error).__name__}: {error}",
        "env_fn; no other check was made",
        "make what it holds (locks, files, connections) inside the function, or use the serial or thread backend",
    )


def _run_group(group: str, pickled: bytes, num_steps: int, limit_s: float) -> Iterator[Finding]:
    """Run one group in a child process, and yield its findings, even if it crashes or hangs."""
    began_s = time.monotonic()
    settings = {"group": group, "num_steps": num_steps, "budget_s": min(STEPS_BUDGET_S, limit_s / 2), "path": sys.path}
    with _child() as (child, lines):
        try:
            with cast("IO[bytes]", child.stdin) as stdin:
                stdin.write(cloudpickle.dumps(settings) + pickled)
            is_whole = yield from _read_findings(lines, began_s + limit_s)
            code = child.wait(max(0.1, began_s + limit_s - time.monotonic()))
        except (subprocess.TimeoutExpired, TimeoutError):
            yield Finding(
                "hangs",
                Severity.ERROR,
                f"the checks did not end within {limit_s:g} s: the env hangs, or a step or a constructor is very slow",
                f"group {group!r}",
                "find where with `py-spy dump`; in a pool, set step_timeout_s and reset_timeout_s",
            )
            return
        except BrokenPipeError:
            code, is_whole = child.wait(), False
    if code or not is_whole:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        yield Finding(
            "crashes",
            Severity.ERROR,
            f"the env ended its process with {how}",
            f"group {group!r}",
            "run it under a native debugger; in a pool, use backend='process' and crash_dir",
        )


@contextmanager
def _child() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a probe, and yield its process and the descriptor of its findings. At the end, end it and its children."""
    reader, writer = os.pipe()
    try:
        command = [sys.executable, "-m", "stepmill.observe.doctor_probe", str(writer)]
        quiet = subprocess.DEVNULL
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, pass_fds=(writer,), start_new_session=True
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    try:
        yield child, reader
    finally:
        os.close(reader)
        # The whole process group, because the env may have started processes.
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
        if child.stdin is not None:
            child.stdin.close()


def _read_findings(reader: int, until_s: float) -> Generator[Finding, None, bool]:
    """Yield findings until the probe closes its end. Return whether it finished its checks.

    Raises:
        TimeoutError: the probe has not closed its end in time.
    """
    text, is_whole = b"", False
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not select.select([reader], [], [], left_s)[0]:
            raise TimeoutError
        part = os.read(reader, 1 << 16)
        *lines, text = (text + part).split(b"\n")
        for fields in map(json.loads, lines):
            is_whole = is_whole or not fields or fields["check"] == "hangs"
            if fields:
                yield Finding(**{**fields, "severity": Severity(fields["severity"])})
        if not part or is_whole:
            return is_whole


def run_doctor(
    env_id: str, env_fn: Callable[[], object], num_steps: int, *, is_json: bool, is_quiet: bool
) -> Diagnosis:
    """Diagnose, show the progress on a terminal, and print the result."""
    from stepmill.observe.progress import BarColumn, TextColumn, TimeElapsedColumn, show_progress

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with show_progress(*columns, is_quiet=is_quiet) as progress:
        task = progress.add_task("checks", total=len(GROUPS))

        def begin(group: str) -> None:
            progress.update(task, description=f"{env_id}: {group}", completed=GROUPS.index(group))

        diagnosis = diagnose(env_fn, name=env_id, num_steps=num_steps, on_group=begin)
    print(diagnosis.to_json() if is_json else diagnosis, flush=True)
    return diagnosis
