"""Saves the positions of a pool's envs, and restores them, in the same pool or in another one: `stepmill.save`, `stepmill.restore`.

A position is what the pool knows of an env. The env object gets its state back in one of these ways:

    "memory"   a kernel's memory is copied
    "state"    a function of the user's sets what another one has read
    "log"      the logged episode is replayed, and each result is compared with the first one
    "reset"    there is nothing to give back: the next command of the env begins an episode
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepmill.backends.base import traits_of
from stepmill.pool.arguments import whole_ids
from stepmill.pool.events import ServerView
from stepmill.pool.replays import INCOMPLETE_LOG
from stepmill.pool.requests import EnvRequests
from stepmill.pool.resets import ResetPlanner
from stepmill.pool.start import PoolRuntime
from stepmill.spec.batch import Batch
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import BusyEnvError, UsageError
from stepmill.spec.options import BackendName, EnvState, PoolOptions
from stepmill.spec.tree import leaves, opaques
from stepmill.worker.messages import RequestKind

StateFunctions: TypeAlias = "tuple[Callable[[Any], object], Callable[[Any, Any], object]]"
"""`get_state(env)` returns the whole state of an env, and `set_state(env, state)` sets it."""

NOT_RESTORED = "not_restored"
_COPIED = ("memory", "state")
_FAULTED = int(EnvState.FAULTED)
_OPTIONS = ("autoreset_mode", "seeding", "num_episodes", "spare_envs")
_NO_LOG = (
    "its episode is not logged from its reset on: make the envs with on_fault='replay' and seeding='per_episode', which need "
    "envs whose randomness comes from reset(seed), or give state=(get_state, set_state)"
)


@dataclass(frozen=True)
class SavedEnvs:
    """The positions of B envs at one time. It can be pickled.

    Attributes:
        env_ids: the envs.
        how: for each env, how its object gets its state back: "memory", "state", "log" or "reset".
        facts: what the envs that are restored must have in common with the saved ones.
        envs: what is saved of each env. The format is not public.
        whole: what is saved of the whole pool; empty if only some envs were saved.
        front_end: what a front-end adds.
        obs: the newest observations of the envs, [B, ...] in the structure of the observation; None if read from a file.
    """

    env_ids: tuple[int, ...]
    how: tuple[str, ...]
    facts: dict[str, Any]
    envs: tuple[dict[str, Any], ...] = field(repr=False)
    whole: dict[str, Any] = field(repr=False)
    front_end: dict[str, Any] = field(default_factory=dict, repr=False)
    obs: Any = field(default=None, repr=False)


class Positions:
    """Takes and restores the positions of a pool's envs."""

    def __init__(
        self, runtime: PoolRuntime, requests: EnvRequests, resets: ResetPlanner, options: PoolOptions, num_envs: int
    ) -> None:
        self._state, self._revival = runtime.state, runtime.revival
        self._recovery, self._replays = self._revival.recovery, self._revival.recovery.replays
        self._workers = self._recovery.workers
        self._requests, self._resets, self._options, self._num_envs = requests, resets, options, num_envs
        self._restored: Any = None  # the newest batch of the last restore of all envs
        self._replaced: set[int] = set()  # envs that have been restored since then
        self._is_kernel = options.backend is BackendName.KERNEL
        self._facts = _facts(runtime.specs[0], options) | {"kernel": traits_of(runtime.backend).identity}

    # ---- saving -------------------------------------------------------------------------------------------------------

    def save(self, env_ids: Any, state: StateFunctions | None) -> SavedEnvs:
        """Return the positions of these envs, or of all if `env_ids` is None.

        Raises:
            UsageError: the state of an env cannot be saved.
            BusyEnvError: an env has a fault that was not received; or it is stepping, and its state is memory or the user's.
        """
        ids = self._requests.checked_ids(env_ids)
        if env_ids is not None and self._options.resets.spare_envs:
            raise UsageError("envs that share spares are saved all together; leave env_ids out")
        self._revival.wait_until_rebuilt(range(len(self._workers.records)), None)
        self._recovery.news.raise_errors(is_receiving=False)
        positions, views = self._state.positions(ids), self._state.view(env_ids=ids)
        how = [self._how(position, state) for position in positions]
        rows = list(zip(ids, how, positions, views, strict=True))
        self._check_saved(rows)
        own = [env_id for env_id, way in zip(ids, how, strict=True) if way == "state"]
        values: dict[int, Any] = {}
        if state is not None and own:
            values.update(zip(own, self._requests.send(RequestKind.GET_ATTR, own, state[0]).result(), strict=True))
        envs = tuple(
            {
                "position": position | {"is_replayed": way in ("log", "reset")},
                "value": values.get(env_id),
                **self._calls_and_settings(view.server),
            }
            for env_id, way, position, view in rows
        )
        whole = {} if env_ids is not None else self._save_whole()
        return SavedEnvs(tuple(ids), tuple(how), self._facts_of(positions), envs, whole, obs=self._state.observe(ids))

    def _facts_of(self, positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what must be the same elsewhere. A kernel's memory fits all options, unless its episode has ended."""
        if not self._is_kernel:
            return self._facts
        has_ended = any(position["outcome"][-1] for position in positions)  # its autoreset mode says how it goes on
        free = set(_OPTIONS) - ({"autoreset_mode"} if has_ended else set())
        return {name: value for name, value in self._facts.items() if name not in free}

    def _save_whole(self) -> dict[str, Any]:
        queued = [view.server for view in self._state.view(env_ids=range(self._num_envs, self._requests.num_servers))]
        return {
            "spares": self._state.spare_positions(),
            "unseeded": sorted(self._resets.unseeded),
            "queued": [self._calls_and_settings(server) for server in queued],
            "batch": self._newest_results(),
        }

    def newest_batch(self) -> Batch | None:
        """Return the newest results of all envs, also of restored ones; None if their infos cannot be read."""
        results = self._newest_results()
        return None if results is None else Batch(self._state.observe(None), *results)

    def _newest_results(self) -> Any:
        """Return the newest batch of all envs without its observations, which are in the positions; None if it cannot be read.

        Infos of envs that were restored alone are only those of their replays.
        """
        has_results, batch = self._state.newest_batch()
        if batch is None or has_results or self._restored is None:
            return batch and batch[1:]
        if not self._replaced:
            return self._restored
        info = _without_rows(self._restored[3], sorted(self._replaced))
        return *batch[1:4], {**info, **batch[4]}, *batch[5:]

    def _calls_and_settings(self, server: int) -> dict[str, list[Any]]:
        calls = [each.saved() for each in self._replays.log.calls_of(server)]
        return {"calls": calls, "settings": self._workers.settings_of(server).saved(server)}

    def _how(self, position: Mapping[str, Any], state: StateFunctions | None) -> str:
        if self._is_kernel:
            return "memory"
        if not position["needs_state"]:
            return "reset"
        return "log" if state is None else "state"

    def _check_saved(self, rows: Sequence[tuple[int, str, Mapping[str, Any], ServerView]]) -> None:
        busy = [env_id for env_id, way, _, view in rows if view.is_pending and way in _COPIED]
        if busy:
            text = f"envs {busy} are stepping, or have results to be received, and the states of idle envs are saved; recv() first"
            raise BusyEnvError(text, env_ids=busy)
        for env_id, way, position, view in rows:
            reason = "" if way != "log" or position["is_whole"] else _NO_LOG
            if way in ("log", "reset") and not self._replays.log.is_whole(view.server):
                reason = INCOMPLETE_LOG
            if reason:
                raise UsageError(f"env {env_id} cannot be saved: {reason}")

    # ---- restoring ----------------------------------------------------------------------------------------------------

    def restore(
        self, saved: SavedEnvs, env_ids: Any, state: StateFunctions | None, *, strict: bool
    ) -> NDArray[np.int64]:
        """Give envs saved positions, or one position to all of them. Return their ids.

        Raises:
            UsageError: the positions do not fit these envs, and no env is changed; or, if `strict`, a replay gave another
                result than before.
            BusyEnvError: an env is stepping, or has a result to be received. No env is changed.
            WorkerDied, EnvError, EnvTimeout: a worker that had died could not be restarted.
        """
        ids = whole_ids(saved.env_ids if env_ids is None else env_ids)
        self._check_fits(saved, ids, state)
        states = self._state.states()
        if _FAULTED in states:  # a restored position replaces their faults, and their worker may be dead
            self._revival.revive_only([each for each in sorted({*ids}) if states[each] == _FAULTED])
        spares = saved.whole.get("spares") if len(ids) == self._num_envs else None
        has_objects = not self._is_kernel or any(each["settings"] for each in saved.envs)
        unseeded = set(saved.whole.get("unseeded", ()))  # what is read before this line changes no env if it was forged
        rows = np.array(ids, np.int64)  # once, because converting the list takes as long as all else
        self._state.restore_positions(rows, [each["position"] for each in saved.envs], spares)
        if len(ids) == self._num_envs:
            self._restored, self._replaced = saved.whole.get("batch"), set()
        elif self._restored is not None:
            self._replaced.update(ids)
        if self._resets.unseeded:
            self._resets.unseeded.difference_update(ids)
        self._resets.unseeded.update(unseeded)
        if has_objects:
            self._restore_objects(saved, ids, state)
            if self._replays.is_on:
                self._end_replays(ids, strict=strict)
        return rows

    def _restore_objects(self, saved: SavedEnvs, ids: Sequence[int], state: StateFunctions | None) -> None:
        """Give env objects their calls, settings and states, and begin their replays, also after an error: nothing else would end the wait."""
        try:
            for view, each in zip(self._state.view(env_ids=ids), cycle(saved.envs)):
                self._restore_calls(view, each)
            for place, each in enumerate(saved.whole.get("queued", ())):
                self._restore_calls(self._state.view(env_ids=[self._num_envs + place])[0], each)
            if state is not None:
                self._restore_states(saved, ids, state[1])
        finally:
            if self._replays.is_on:
                self._begin_replays(ids)

    def _check_fits(self, saved: SavedEnvs, ids: Sequence[int], state: StateFunctions | None) -> None:
        if len(ids) != len(saved.envs) != 1:
            raise UsageError(f"got {len(ids)} env_ids for {len(saved.envs)} saved envs; give one per saved env")
        for name, value in saved.facts.items():
            if self._facts.get(name) != value:
                raise UsageError(
                    f"the envs were saved with {name}={value!r}, and these have {self._facts.get(name)!r}; make the envs with "
                    "the same functions and options"
                )
        if "state" in saved.how and state is None:
            raise UsageError("the envs were saved with state=(get_state, set_state); give restore() the same functions")
        if ("log" in saved.how or any(each["calls"] for each in saved.envs)) and not self._replays.is_on:
            raise UsageError(
                "saved episodes are replayed; make the envs with on_fault='replay', as those that were saved"
            )

    def _restore_states(self, saved: SavedEnvs, ids: Sequence[int], set_state: Callable[[Any, Any], object]) -> None:
        values = {
            env_id: (each["value"], each["position"])
            for env_id, each, way in zip(ids, cycle(saved.envs), cycle(saved.how))
            if way == "state"
        }
        if values:
            self._requests.send_each(RequestKind.RESTORE, values, lambda own: (set_state, own)).result()

    def _restore_calls(self, view: ServerView, saved: Mapping[str, Any]) -> None:
        """Record the calls and settings of an env object. Without a log of calls, apply the settings at once."""
        if self._replays.is_on:
            self._replays.log.restore(view.server, saved["calls"])
        for kind, name, value in saved["settings"]:
            if self._replays.is_on or self._is_kernel:  # a kernel's memory has what was set
                self._workers.settings_of(view.server).put(RequestKind(kind), name, view.server, value)
            else:
                self._requests.set(RequestKind(kind), name, [value], [view.env_id])

    def _begin_replays(self, ids: Sequence[int]) -> None:
        replays, decisions = self._replays, []
        text = "the episode of the saved env could not be replayed"
        info = {"kind": NOT_RESTORED, "error": "UsageError", "message": text}
        replays.reasons.clear()
        for view in self._state.view(env_ids=ids):
            if view.is_suspended:
                decisions += replays.begin(view, info, is_new=True)
            else:
                replays.repeat_waiting(view)
        self._recovery.carry_out(decisions)

    def _end_replays(self, ids: Sequence[int], *, strict: bool) -> None:
        self._revival.waits.run_until(lambda: not any(each.is_suspended for each in self._state.view(env_ids=ids)))
        self._recovery.news.raise_errors(is_receiving=False)
        if strict and self._replays.reasons:
            env_id, reason = next(iter(self._replays.reasons.items()))
            raise UsageError(
                f"env {env_id} could not be restored: {reason}; with strict=False it begins a new episode in its next step; "
                "reset() all envs if you do not go on with these"
            )


def _without_rows(info: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return a merged info in which these rows have no values."""
    left: dict[str, Any] = {}
    for key, column in info.items():
        if isinstance(column, Mapping):
            left[key] = _without_rows(column, rows)
            continue
        left[key] = column.copy()
        left[key][rows] = None if column.dtype.hasobject else np.zeros((), column.dtype)
    return left


def _facts(spec: EnvSpec, options: PoolOptions) -> dict[str, Any]:
    def describe(node: Any) -> str:
        parts = [f"{path}:{leaf.dtype.str}{list(leaf.shape)}" for path, leaf in leaves(node)]
        return " ".join([*parts, f"and {len(opaques(node))} without a fixed size"])

    facts: dict[str, Any] = {
        "observation": describe(spec.observation),
        "action": describe(spec.action),
        "info": describe(spec.info),
    }
    facts |= {"agents": list(map(str, spec.agents)), "batch_size": spec.batch_size, "reward": spec.reward.dtype.str}
    facts |= {"autoreset_mode": options.autoreset_mode.value, "seeding": options.seeding.value}
    return facts | {"num_episodes": options.num_episodes, "spare_envs": options.resets.spare_envs}
