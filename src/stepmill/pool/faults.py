"""Turns fault records into errors that name the env, the cause and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from stepmill import _native
from stepmill.pool.events import EnvFailed, FaultKind
from stepmill.spec.errors import BadOutput, EnvError, EnvTimeout, StepmillError
from stepmill.spec.options import OnFault
from stepmill.worker.error_records import env_error
from stepmill.worker.messages import ErrorRecord, load

# The last part of the text of WorkerDied errors, which says what happens to the envs.
DEATH_HINTS = {
    OnFault.RAISE: "bring them back with reset() or revive(), or let on_fault='truncate' do it",
    OnFault.TRUNCATE: "their episodes are cut short",
    OnFault.REPLAY: "their episodes are replayed",
}
# What has happened to envs that exceeded a time limit, by the class of the exception that says so.
LATE = {
    "stepmill.worker.coroutines.Cancelled": "was cancelled; its worker goes on",
    "stepmill.spec.remote_env.CallTooLate": "its simulator was ended; its worker goes on",
}


def late_error(env_id: int, lost: Sequence[int], phase: str, timeout_s: float | None, hint: str) -> EnvTimeout:
    """Return the error for an env that took too long in a "step" or "reset".

    Args:
        env_id: the env.
        lost: all envs of its worker, which was ended.
        phase: what the env was doing.
        timeout_s: the limit, in seconds.
        hint: what happens to the envs, or what the user can do.
    """
    others = [other for other in lost if other != env_id]
    with_it = f", and with it envs {others}" if others else ""
    limit_s = timeout_s or 0.0
    return EnvTimeout(
        f"env {env_id} took longer than its deadline of {limit_s:g} s for a {phase}, and its worker was ended{with_it}; "
        f"raise the deadline if it is too short; {hint}",
        env_id=env_id,
        phase=phase,
        timeout_s=limit_s,
        env_ids=[env_id, *others],
    )


def fault_error(fault: EnvFailed) -> StepmillError:
    """Return the error for an env that raised an exception or returned an invalid value."""
    env_id, kind = fault.env_id, fault.kind
    record = _read_record(fault.record)
    if kind is None or not _is_record(record):
        return _unreadable_record(env_id, kind)
    if record["type"] in LATE:
        return late_call_error(record, env_id)
    if kind is not FaultKind.BAD_OUTPUT:
        return env_error(record, env_id)
    part, _, phase = record["phase"].partition(" of ")
    what = record["message"] or record["type"]
    advice = "correct the env, or the spaces it declares"
    leaf = ""
    if part == "info":
        advice = "leave it out, or use backend='serial' or 'thread', where infos need not be pickled"
        leaf = what.partition(" cannot be pickled")[0]
    text = f"env {env_id} gave a wrong {record['phase']}: {what}; {advice}"
    return BadOutput(text, env_id=env_id, leaf=leaf, phase=phase)


def late_call_error(record: ErrorRecord, env_id: int) -> EnvTimeout:
    """Return the error for a step, a reset or a call that was too late and ended by itself."""
    limit_s, phase = record["message"], record["phase"]
    needs_reset = phase in ("step", "reset")
    return EnvTimeout(
        f"env {env_id} took longer than its deadline of {limit_s} s for a {phase}, and {LATE[record['type']]}; "
        f"raise the deadline if it is too short{'; reset the env' if needs_reset else ''}",
        env_id=env_id,
        phase=phase,
        timeout_s=float(limit_s),
        env_ids=[env_id] if needs_reset else [],
        remote_traceback=record["traceback"],
    )


def describe_fault(fault: EnvFailed) -> str:
    """Return a clause that names an env and its exception, or the kind of its fault."""
    kind = fault.kind
    if kind is not None and fault.record is not None:
        return fault_error(fault).message
    return f"env {fault.env_id} failed ({kind_name(kind)})"


def kind_name(kind: FaultKind | None) -> str:
    """Return the name of a kind of fault, as users see it."""
    return "unreadable" if kind is None else kind.name.lower()


def _unreadable_record(env_id: int, kind: FaultKind | None) -> StepmillError:
    """Return the error of a fault whose record cannot be read, or whose kind is unknown."""
    if kind in (FaultKind.RAISED, FaultKind.BAD_ACTION):
        return EnvError(f"env {env_id} raised, but the exception cannot be read; reset it", env_id=env_id, phase="step")
    text = (
        f"env {env_id} gave a wrong output, but the description cannot be read; reset it"
        if kind is FaultKind.BAD_OUTPUT
        else f"the result of env {env_id} cannot be read: its memory was overwritten, probably by native code of an env of the "
        "same worker; reset it, and isolate the envs with envs_per_worker=1"
    )
    return BadOutput(text, env_id=env_id, phase="step")


def _is_record(record: object) -> TypeGuard[dict[str, str]]:
    return (
        isinstance(record, dict)
        and set(record) == {"phase", "type", "message", "traceback"}
        and all(isinstance(value, str) for value in record.values())
    )


def _read_record(data: bytes | dict[str, str] | None) -> object:
    try:
        return _native.decode(data, load) if isinstance(data, bytes) else data
    except Exception:  # a worker has overwritten the record
        return None


def fault_info(kind: str, error: StepmillError) -> dict[str, str]:
    """Return the `info["fault"]` of an episode that was cut short.

    It has the kind, the class and the text of the error, and the path of the crash capsule if there is one.
    """
    info = {"kind": kind, "error": type(error).__name__, "message": error.message}
    return info if error.capsule is None else {**info, "capsule": error.capsule}
