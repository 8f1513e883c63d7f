"""`stepmill doctor`: looks for problems that make an env slow, wrong or fragile in a pool.

    diagnose(env_fn) ──► one child process per group of checks (doctor_probe.py) ──► Finding, Finding, ... ──► text or JSON

Each group runs in a separate process, so that an env that crashes or hangs is a finding and does not end the diagnosis.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from stepmill._pickling import dumps
from stepmill.observe.findings import Finding, Severity, make_finding
from stepmill.spec.errors import UsageError

GROUPS = ("steps", "seeds", "backends", "forks")
NUM_STEPS = 10_000
LIMIT_S = 120.0  # after which the env of a group counts as hung
STEPS_BUDGET_S = 30.0  # after which the long run of steps ends if the env is slow


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
        pickled = dumps(env_fn)
    except Exception as error:  # the user's objects may raise anything
        what = f"the function that makes the env cannot be pickled: {type(error).__name__}: {error}"
        diagnosis.findings.append(make_finding("unpicklable-factory", what, "env_fn; no other check was made"))
        return diagnosis
    for group in groups:
        if group == "backends" and any(finding.check == "non-deterministic" for finding in diagnosis.findings):
            continue  # the data of two runs differ on one backend already
        on_group(group)
        found = _run_group(group, pickled, num_steps, limit_s)
        diagnosis.groups.append(group)
        known = {finding.check for finding in diagnosis.findings}
        diagnosis.findings += [finding for finding in found if finding.check not in known]
        if any(finding.check in ("crashes", "hangs", "raises", "not-checked") for finding in found):
            break  # the other groups would find the same
    return diagnosis


def _run_group(group: str, pickled: bytes, num_steps: int, limit_s: float) -> list[Finding]:
    """Run one group in a child process, and return its findings, even if it crashes or hangs."""
    settings = {"group": group, "num_steps": num_steps, "budget_s": min(STEPS_BUDGET_S, limit_s / 2), "path": sys.path}
    with open(os.memfd_create("stepmill-doctor"), "rb") as output:
        code = _run_probe(output.fileno(), dumps(settings) + pickled, limit_s)
        output.seek(0)
        # A probe that was killed may have left a part of a line.
        rows = [json.loads(line) for line in output if line.endswith(b"\n")]
    found = [make_finding(*row) for row in rows if row]
    if code is None:
        what = f"the checks did not end within {limit_s:g} s: the env hangs, or a step or a constructor is very slow"
        found.append(make_finding("hangs", what, f"group {group!r}"))
    elif code or [] not in rows:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        found.append(make_finding("crashes", f"the env ended its process with {how}", f"group {group!r}"))
    return found


def _run_probe(output: int, data: bytes, limit_s: float) -> int | None:
    """Run a probe that writes its findings to the descriptor `output`. Return its exit status, or None if it hangs."""
    command = [sys.executable, "-m", "stepmill.observe.doctor_probe", str(output)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, pass_fds=(output,), start_new_session=True
    ) as child:
        try:
            child.communicate(data, limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # the whole process group, because the env may have started processes
                os.killpg(child.pid, signal.SIGKILL)
    return child.returncode


def run_doctor(
    env_id: str, env_fn: Callable[[], object], num_steps: int, *, is_json: bool, is_quiet: bool
) -> Diagnosis:
    """Diagnose, show the progress on a terminal, and print the result."""
    from stepmill.observe.progress import show_progress

    with show_progress(env_id, len(GROUPS), is_quiet=is_quiet) as show:

        def on_group(group: str) -> None:
            show(GROUPS.index(group), f"{env_id}: {group}")

        diagnosis = diagnose(env_fn, name=env_id, num_steps=num_steps, on_group=on_group)
    print(diagnosis.to_json() if is_json else diagnosis, flush=True)
    return diagnosis
