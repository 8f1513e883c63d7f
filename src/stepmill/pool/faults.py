"""Fault records of rows become errors that name the env, the cause and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeGuard

from stepmill import _native
from stepmill.spec.errors import BadOutput, EnvError, EnvTimeout, StepmillError
from stepmill.worker.messages import load
from stepmill.worker.records import env_error


class FaultKind(IntEnum):
    """Why a row has no honest result; the numbers are those of `_native/protocol.hpp`."""

    RAISED = 1
    BAD_OUTPUT = 2
    BAD_ACTION = 3
    DIED = 4
    TIMED_OUT = 5
    NEIGHBOUR = 6
    INTERRUPTED = 7


FaultRow = tuple[int, int, "bytes | dict[str, str] | None"]  # env_id, kind, record


def late_error(env_id: int, lost: Sequence[int], phase: str, timeout_s: float | None) -> EnvTimeout:
    """Return the error for an env that took too long in a "step" or "reset"; `lost`: the envs of its worker, which is gone."""
    others = [other for other in lost if other != env_id]
    with_it = f", and with it envs {others}" if others else ""
    limit_s = timeout_s or 0.0
    return EnvTimeout(
        f"env {env_id} took longer than its deadline of {limit_s:g} s for a {phase}, and its worker was ended{with_it}; "
        "raise the deadline, or bring them back with reset()",
        env_id=env_id,
        phase=phase,
        timeout_s=limit_s,
        env_ids=[env_id, *others],
    )


def fault_error(row: FaultRow) -> StepmillError:
    """Return the error for an env that raised, or gave rubbish."""
    env_id, number, data = row
    kind = kind_of(number)
    record = _read_record(data)
    if kind is None or not _is_record(record):
        return _lost_words(env_id, kind)
    if kind is not FaultKind.BAD_OUTPUT:
        return env_error(record, env_id)
    part, _, phase = record["phase"].partition(" of ")
    what = record["message"] or record["type"]
    way_out = "correct the env, or the spaces it declares"
    leaf = ""
    if part == "info":
        way_out = "leave it out, or use backend='serial' or 'thread', where infos need not be pickled"
        leaf = what.partition(" cannot be pickled")[0]
    text = f"env {env_id} gave a wrong {record['phase']}: {what}; {way_out}"
    return BadOutput(text, env_id=env_id, leaf=leaf, phase=phase)


def _lost_words(env_id: int, kind: FaultKind | None) -> StepmillError:
    """Return the error of a fault whose record cannot be read, or that is none of ours."""
    if kind in (FaultKind.RAISED, FaultKind.BAD_ACTION):
        return EnvError(
            f"env {env_id} raised, and what it raised cannot be read; reset it", env_id=env_id, phase="step"
        )
    if kind is FaultKind.BAD_OUTPUT:
        return BadOutput(
            f"env {env_id} gave a wrong output, and what was wrong cannot be read; reset it",
            env_id=env_id,
            phase="step",
        )
    return BadOutput(
        f"the result of env {env_id} cannot be read: its memory was overwritten, probably by native code of an env of the "
        "same worker; reset it, and isolate the envs with envs_per_worker=1",
        env_id=env_id,
        phase="step",
    )


def _is_record(record: object) -> TypeGuard[dict[str, str]]:
    return (
        isinstance(record, dict)
        and set(record) == {"phase", "type", "message", "traceback"}
        and all(isinstance(value, str) for value in record.values())
    )


def after_attempts(error: StepmillError, attempts: int) -> StepmillError:
    """Return the error of the last of several attempts to reset an env, which now says how many they were."""
    error.message = f"{error.message}; it was the last of {attempts} attempts to reset it"
    error.args = (error.message,)
    return error


def kind_of(number: int) -> FaultKind | None:
    """Return the kind behind a fault word; None for one that no worker of ours would write."""
    return FaultKind(number) if number in FaultKind._value2member_map_ else None


def _read_record(data: bytes | dict[str, str] | None) -> object:
    try:
        return _native.decode(data, load) if isinstance(data, bytes) else data
    except Exception:  # whatever a worker that lost its mind has left there
        return None


def fault_info(kind: str, error: StepmillError) -> dict[str, str]:
    """Return what `info["fault"]` says of an episode that was cut short: kind, class, text, and crash capsule if there is one."""
    info = {"kind": kind, "error": type(error).__name__, "message": error.message}
    return info if error.capsule is None else {**info, "capsule": error.capsule}
