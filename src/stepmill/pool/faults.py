"""Fault records of rows become errors that name the env, the cause and the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from stepmill import _native
from stepmill.spec.errors import BadOutput, EngineBug, EnvTimeout, StepmillError
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


FaultRow = tuple[int, int, "bytes | None"]  # env_id, kind, record
_OF_WORKER = (FaultKind.DIED, FaultKind.NEIGHBOUR)


def fault_errors(
    faults: Sequence[FaultRow], worker_of: Callable[[int], int], obituary: Callable[[int], StepmillError]
) -> list[StepmillError]:
    """Return one error per env that failed by itself, and one per worker that died.

    Args:
        faults: what the ledger reports.
        worker_of: which worker serves an env.
        obituary: the error that tells of a worker's death.
    """
    errors: list[StepmillError] = []
    told: set[int] = set()
    for env_id, number, data in faults:
        kind = FaultKind(number)
        if kind in _OF_WORKER:
            worker = worker_of(env_id)
            if worker not in told:
                told.add(worker)
                errors.append(obituary(worker))
        elif kind is FaultKind.TIMED_OUT:
            errors.append(
                EnvTimeout(f"env {env_id} took longer than its deadline; its worker was ended", env_id=env_id)
            )
        else:
            errors.append(_own_error(env_id, kind, data))
    return errors


def _own_error(env_id: int, kind: FaultKind, data: bytes | None) -> StepmillError:
    record = None if data is None else _native.decode(data, load)
    if not isinstance(record, dict) or set(record) != {"phase", "type", "message", "traceback"}:
        return EngineBug(f"env {env_id} failed ({kind.name}), and the words of its fault were lost; please report this")
    if kind is FaultKind.RAISED:
        return env_error(record, env_id)
    return BadOutput(
        f"env {env_id} gave a wrong {record['phase']}: {record['message']}; correct the env, or the spaces it declares",
        env_id=env_id,
        phase=record["phase"].removeprefix("output of "),
    )
