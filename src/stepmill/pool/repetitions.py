"""Failures that come again as an episode is played again: then playing it once more does not help."""

from __future__ import annotations

from stepmill.spec.errors import EnvError, StepmillError, WorkerDied

Place = tuple[int, ...]  # env object, episode, results of it so far


ENOUGH = 2  # failures of the same kind at the same place
ENOUGH_FROM_OUTSIDE = 3  # no env does this to itself: it may be chance, or memory that runs out at that place
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM")


class Repetitions:
    """Counts each env's failures of one kind at one place in a row."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Place, str, int]] = {}
        self._tickets: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._excused: set[int] = set()

    def note(self, env_id: int, place: Place, ticket: int, error: StepmillError) -> None:
        """An env failed in a step; `place` is the same only if it got no further since.

        A failure is found again, with the same ticket, if its worker died before the env could be played again.
        """
        if self._tickets.get(env_id) == ticket:
            return
        self._tickets[env_id] = ticket
        if env_id in self._excused:
            self._excused.remove(env_id)
            return
        what = _name_of(error)
        last_place, last_what, count = self._last.get(env_id, ((), "", 0))
        count = count + 1 if (last_place, last_what) == (place, what) else 1
        if count >= (ENOUGH_FROM_OUTSIDE if what in _FROM_OUTSIDE else ENOUGH):
            self._reasons[env_id] = f"step {place[-1]} failed in the same way when it was played again ({what})"
        self._last[env_id] = place, what, count

    def excuse(self, env_id: int) -> None:
        """The failure of this env that will be noted next came elsewhere: while it was played again."""
        self._excused.add(env_id)

    def take_reason(self, env_id: int) -> str | None:
        """Return why playing the env's episode once more does not help, once; None if it may."""
        return self._reasons.pop(env_id, None)


def _name_of(error: StepmillError) -> str:
    """What of a failure is the same if it has the same cause: not its words, in which there may be times and addresses."""
    if isinstance(error, EnvError):
        return error.error_type
    if isinstance(error, WorkerDied):
        return error.signal_name or f"exit code {error.exit_code}"
    return type(error).__name__
