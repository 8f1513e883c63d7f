"""The command `stepmill replay`: its questions and its output. The replay itself is in replay.py."""

from __future__ import annotations

import contextlib
import json
import pdb  # noqa: T100  it is what --pdb asks for
import sys
from dataclasses import asdict, replace

from stepmill.observe.catalog import load_function, search_current_directory
from stepmill.observe.exit_status import ExitStatus
from stepmill.observe.replay import RecordingEnvFn, Report, Verdict, code_to_run, env_fn_of
from stepmill.observe.replay import replay as replay_episode
from stepmill.pool.capsule import Capsule, read_capsule
from stepmill.spec.errors import UsageError

MAX_SHOWN = 2000  # characters of the list of code in an error message; the question at the terminal shows all


def replay_file(file: str, *, env: str | None, trust: bool, has_pdb: bool, in_process: bool, is_json: bool) -> int:
    """Replay a capsule, print the result, and return the exit status. The arguments are those of `stepmill replay`.

    Raises:
        UsageError: the file is not a capsule, or is not trusted, or its env cannot be made here.
    """
    capsule = read_capsule(file, trust=trust)
    if not is_json:
        print(describe_capsule(capsule))
    code = [] if trust else code_to_run(capsule, has_env=env is not None)
    if code:
        ask_for_trust(file, code)
        capsule = replace(capsule, is_trusted=True)
    search_current_directory()
    # The output of an env must not mix with the JSON.
    with contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext():
        env_fn = env_fn_of(capsule) if env is None else load_function("--env", env)
        recording_env_fn = RecordingEnvFn(env_fn)
        report = replay_episode(capsule, recording_env_fn, in_process=in_process or has_pdb)
    if is_json:
        print(json.dumps({"file": file, "capsule": facts(capsule), **asdict(report)}, indent=2))
    else:
        print(summary(capsule, report))
    sys.stdout.flush()
    if has_pdb and report.failure is not None:
        debug(recording_env_fn.error)
    return ExitStatus.DONE if report.verdict is Verdict.REPRODUCED else ExitStatus.FAILED


def ask_for_trust(file: str, code: list[str]) -> None:
    """Show the user what the replay runs according to the capsule, and ask for permission.

    Raises:
        UsageError: the user refuses, or stdin is not a terminal.
    """
    values = [_printable(line) for line in code]
    if not sys.stdin.isatty():
        raise UsageError(
            f"replaying {file} would run code of the file ({_shortened('; '.join(values))}); add --trust if you trust its source"
        )
    listed = "\n".join(f"  {value}" for value in values)
    sys.stderr.write(
        f"Replaying this file can run any code that is in it. By its own account it has\n{listed}\nContinue? [y/N] "
    )
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("the replay was refused; nothing was loaded")


def debug(error: BaseException | None) -> None:
    """Open the debugger at the frame that raised the env's error, if there is one."""
    if error is None:
        print("There is nothing to debug: no Python code of the env raised.")
        return
    pdb.post_mortem(error.__traceback__)


def facts(capsule: Capsule) -> dict[str, object]:
    """Return the capsule's description of the failure as JSON values."""
    names = ("kind", "command", "env_id", "error_type", "message", "signal_name", "exit_code")
    return {name: getattr(capsule, name) for name in (*names, "seed", "episode", "num_steps", "made", "notes")}


def describe_capsule(capsule: Capsule) -> str:
    """Return the capsule's description of the failure as text."""
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
        lines += ["  stack of the worker:", *(f"    {_printable(line)}" for line in capsule.trace.splitlines())]
    return "\n".join(lines)


def summary(capsule: Capsule, report: Report) -> str:
    """Return the result of the replay as text."""
    lines = [f"replayed {report.steps} of {capsule.num_steps} steps"]
    if report.divergence is not None:
        where = "the reset" if report.divergence.step == 0 else f"step {report.divergence.step}"
        lines.append(f"  {where} is the first that differs from the capsule: {', '.join(report.divergence.what)}")
    elif report.steps or capsule.is_whole:
        lines.append("  every reward, flag and observation equals the recorded one")
    if report.failure is not None:
        lines.append(f"  {_printable(report.failure.message)}")
        lines += [f"    {_printable(line)}" for line in report.failure.traceback.splitlines()]
    lines += [f"  note: {_printable(difference)}" for difference in report.differences]
    why = {
        Verdict.REPRODUCED: "it failed again in the same way, at the same step",
        Verdict.DIFFERENT_FAILURE: "it failed, but in another way or at another step",
        Verdict.NOT_REPRODUCED: "nothing failed",
        Verdict.NOT_REPLAYABLE: "the capsule does not hold the whole episode; see its notes",
    }[report.verdict]
    return "\n".join([*lines, f"{report.verdict.value}: {why}"])


def _shortened(text: str) -> str:
    left = len(text) - MAX_SHOWN
    return text if left <= 0 else f"{text[:MAX_SHOWN]} ... ({left} more characters)"


def _printable(text: str) -> str:
    """Replace control characters: the file may come from an untrusted source and must not control the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)
