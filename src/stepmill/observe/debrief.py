"""What `stepmill replay` asks and says; the replay itself is in replay.py."""

from __future__ import annotations

import contextlib
import json
import pdb  # noqa: T100  it is what --pdb asks for
import sys
from dataclasses import dataclass

from stepmill.observe.cli import ExitStatus
from stepmill.observe.policy import load_function, search_current_directory
from stepmill.observe.replay import Demand, Report, Verdict, Witness, env_fn_of, needs_trust, replay
from stepmill.spec.capsule import FACTS_NAME, Capsule, read_capsule
from stepmill.spec.errors import UsageError

MAX_SHOWN = 2000  # characters of an error; a question has all


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """The arguments of `stepmill replay`."""

    file: str
    env: str | None = None
    trust: bool = False
    pdb: bool = False
    in_process: bool = False
    is_json: bool = False


def replay_file(request: ReplayRequest) -> int:
    """Replay a capsule, print what came of it, and return the exit status.

    Raises:
        UsageError: the file is no capsule, or not trusted, or its env cannot be made here.
    """
    capsule = read_capsule(request.file)
    if not request.is_json:
        print(story(capsule))
    if not request.trust:
        ask_for_trust(request, needs_trust(capsule, has_env=request.env is not None))
    search_current_directory()
    # What an env prints must not get between the lines of the JSON.
    with contextlib.redirect_stdout(sys.stderr) if request.is_json else contextlib.nullcontext():
        env_fn = env_fn_of(capsule) if request.env is None else load_function("--env", request.env)
        witness = Witness(env_fn)
        report = replay(capsule, witness, in_process=request.in_process or request.pdb)
    if request.is_json:
        print(json.dumps({"file": request.file, "told": facts(capsule), **report.facts()}, indent=2))
    else:
        print(summary(capsule, report))
    sys.stdout.flush()
    if request.pdb and report.failure is not None:
        debug(witness)
    return ExitStatus.DONE if report.verdict is Verdict.REPRODUCED else ExitStatus.FAILED


def ask_for_trust(request: ReplayRequest, demand: Demand | None) -> None:
    """Let the user see all that is imported and called, and refuse it.

    Raises:
        UsageError: the user refuses, or cannot be asked.
    """
    if demand is None:
        return
    calls = [_printable(call) for call in demand.calls]
    modules = _printable(", ".join(demand.modules))
    if not sys.stdin.isatty():
        shown = _shortened(f"to run {'; '.join(calls)}, and to import {modules}")
        raise UsageError(f"{request.file} asks {shown}; add --trust if you know where it comes from")
    listed = "\n".join(f"  {call}" for call in calls)
    sys.stderr.write(f"This file asks to run\n{listed}\nand to import {modules}.\nGo on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was imported, since you do not trust this file")


def debug(witness: Witness) -> None:
    """Open the debugger where the env raised, if it did."""
    if witness.error is None:
        print("There is nothing to debug: no Python code of the env raised.")
        return
    pdb.post_mortem(witness.error.__traceback__)


# ---- words --------------------------------------------------------------------------------------------------------


def facts(capsule: Capsule) -> dict[str, object]:
    """Return what the capsule tells of the failure, as JSON."""
    return {
        "kind": capsule.kind,
        "command": capsule.command,
        "env_id": capsule.env_id,
        "error_type": capsule.error_type,
        "message": capsule.message,
        "signal_name": capsule.signal_name,
        "exit_code": capsule.exit_code,
        "seed": capsule.seed,
        "episode": capsule.episode,
        "num_steps": capsule.num_steps,
        "made": capsule.made,
        "notes": capsule.notes,
    }


def story(capsule: Capsule) -> str:
    """Return what the capsule tells, for people."""
    place = {
        "construct": "in its constructor",
        "reset": f"in the reset after episode {capsule.episode}" if capsule.is_whole else "in a reset",
        "call": f"when it was called, after step {capsule.num_steps} of episode {capsule.episode}",
        "step": f"in step {capsule.num_steps + 1} of episode {capsule.episode}",
    }.get(capsule.command, f"between two commands, after step {capsule.num_steps} of episode {capsule.episode}")
    lines = [
        _printable(
            f"env {capsule.env_id} of {capsule.pool.get('num_envs', '?')} {place} (seed {capsule.seed}), {capsule.made}"
        ),
        f"  {capsule.kind}: {_printable(capsule.message.partition('; crash capsule')[0])}",
        *(f"  note: {_printable(str(note))}" for note in capsule.notes),
    ]
    if capsule.trace:
        lines += ["  where the worker stood:", *(f"    {_printable(line)}" for line in capsule.trace.splitlines())]
    return "\n".join(lines)


def summary(capsule: Capsule, report: Report) -> str:
    """Return what the replay found, for people."""
    lines = [f"replayed {report.steps} of {capsule.num_steps} steps"]
    if report.divergence is not None:
        where = "the reset" if report.divergence.step == 0 else f"step {report.divergence.step}"
        lines.append(f"  {where} is the first to differ from the record: {', '.join(report.divergence.what)}")
    elif report.steps or capsule.is_whole:
        lines.append("  every reward, flag and observation as recorded")
    if report.failure is not None:
        lines.append(f"  {_printable(report.failure.message)}")
        lines += [f"    {_printable(line)}" for line in report.failure.traceback.splitlines()]
    lines += [f"  note: {_printable(difference)}" for difference in report.differences]
    why = {
        Verdict.REPRODUCED: "it failed again, as told and at the same step",
        Verdict.OTHERWISE: "it failed, but not as told",
        Verdict.NOT_REPRODUCED: "nothing failed",
        Verdict.NOT_REPLAYABLE: "the capsule does not hold the whole episode; see its notes",
    }[report.verdict]
    return "\n".join([*lines, f"{report.verdict.value}: {why}"])


def _shortened(text: str) -> str:
    left = len(text) - MAX_SHOWN
    return text if left <= 0 else f"{text[:MAX_SHOWN]} ... ({left} characters more are in its {FACTS_NAME})"


def _printable(text: str) -> str:
    """Return a text without what steers a terminal: the file may come from anywhere."""
    return "".join(char if char.isprintable() else " " for char in text)
