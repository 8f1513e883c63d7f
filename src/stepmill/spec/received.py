"""`Received` and `EnvFault`: the results and the faults that `Pool.receive` returns."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from stepmill.spec.batch import Batch
from stepmill.spec.errors import StepmillError, join_errors


@dataclass(frozen=True, eq=False)
class EnvFault:
    """A fault that the fault policy did not handle. Its envs are FAULTED until reset() or revive() is called.

    Attributes:
        kind: as in `info["fault"]`: "raised", "bad_output", "bad_action", "interrupted" or "unreadable" if the env's worker is
            still running; "died" or "timed_out" if the worker has ended, or could not be restarted.
        error: the error that `recv` would raise. All envs of one fault have the same error object.
        worker: the number of the worker of the envs.
        env_ids: the envs of the fault: one, or all envs that were lost with the worker.
    """

    kind: str
    error: StepmillError
    worker: int
    env_ids: tuple[int, ...]

    @property
    def is_loss(self) -> bool:
        """Whether the worker has ended, so that the env objects are lost."""
        return self.kind in ("died", "timed_out")


@dataclass(frozen=True, eq=False)
class Received:
    """The results and the faults that one call of `Pool.receive` returns.

    An env can have both, if it published a result before its worker died. An env with a fault needs a reset, and not an
    action.

    Attributes:
        batch: the results; None if there are none.
        faults: by env_id, the faults that `recv` would raise, and those that `revive` or a call raised since the last
            `receive`, except for envs that were revived meanwhile. Faults that the fault policy handles appear only in infos.
    """

    batch: Batch | None
    faults: Mapping[int, EnvFault]

    def errors(self, env_ids: Container[int]) -> list[StepmillError]:
        """Return the errors of these envs, each error once. Envs without a fault are skipped."""
        errors = [fault.error for env_id, fault in self.faults.items() if env_id in env_ids]
        return list({id(error): error for error in errors}.values())


def faults_by_env(known: Mapping[int, EnvFault], faults: Iterable[EnvFault]) -> dict[int, EnvFault]:
    """Return the known faults by env, with `faults` added. If an env has two, the newer error has the older in `others`."""
    found = dict(known)
    for fault in faults:
        for env_id in fault.env_ids:
            older = found.get(env_id, fault)
            is_second = older.error is not fault.error
            found[env_id] = replace(fault, error=join_errors([fault.error, older.error])) if is_second else fault
    return found
