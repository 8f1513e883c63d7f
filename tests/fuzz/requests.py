"""Moves that make requests: calls, attributes, rendering, observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepmill.pool.port import PoolPort
from stepmill.spec.errors import EnvError, WorkerDied
from tests.pool_model.calls import Calls
from tests.pool_model.commands import MAX_REPAIRS, Commands
from tests.pool_model.records import FAULTED, NEEDS_RESET, Env
from tests.pool_model.results import require


class Requests:
    """Calls methods of envs, at once or by futures, and checks the values."""

    def __init__(self, calls: Calls, commands: Commands) -> None:
        self.calls, self._commands = calls, commands
        self.setup, self.pool, self.model = calls.setup, calls.pool, calls.model
        self._futures: list[tuple[Any, list[Any]]] = []

    def _callable(self, ids: list[int] | None) -> list[Env]:
        return [] if self.setup.kind in ("batched", "kernel") else self.calls.envs(ids)

    def peek(self, ids: list[int] | None) -> None:
        """Call a method that returns the newest observation: that of the step under way, if there is one."""
        envs = self._callable(ids)
        if envs:
            wanted, to = self._peeks(envs), self.calls.ids(envs)
            self._check_values(
                self.calls.request(
                    "peek", f"pool.call('peek', env_ids={to})", lambda: self.pool.call("peek", env_ids=to)
                ),
                wanted,
            )

    def render(self, ids: list[int] | None) -> None:
        envs = self._callable(ids)
        if envs:
            wanted, to = self._peeks(envs), self.calls.ids(envs)
            self._check_values(self.calls.request("render", f"pool.render({to})", lambda: self.pool.render(to)), wanted)

    def call_later(self, ids: list[int] | None) -> None:
        """Begin a call, whose result is asked for later."""
        envs = self._callable(ids)
        if envs:
            wanted, to = self._peeks(envs), self.calls.ids(envs)
            future = self.calls.make(
                f"futures.append(pool.call_async('peek', env_ids={to}))",
                lambda: self.pool.call_async("peek", env_ids=to),
            )
            if not isinstance(future, BaseException):
                self._futures.append((future, wanted))

    def resolve(self, which: int) -> None:
        """Ask a future for its result, perhaps again."""
        if self._futures:
            place = which % len(self._futures)
            future, wanted = self._futures[place]
            self._check_values(self.calls.request("resolve", f"futures[{place}].result()", future.result), wanted)

    def _peeks(self, envs: Sequence[Env]) -> list[Any]:
        """Return the observation that each env has after its command; None if that is not certain."""
        for env in envs:
            env.is_called = True
        return [self._peek_of(env) for env in envs]

    def _peek_of(self, env: Env) -> Any:
        (row,) = env.rows
        is_certain = not (env.is_loose or self.model.may_fail(env) or row.is_over) and env.status not in (
            FAULTED,
            NEEDS_RESET,
        )
        if not is_certain or self.model.verbs_of(env):
            return None
        if env.command is None:
            return row.place.obs
        if env.command.actions is None:
            return None
        then = self.model.next_of(env)
        return None if any(then.ends) else then.obs

    def _check_values(self, values: Any, wanted: list[Any]) -> None:
        if isinstance(values, BaseException):
            return
        got = [tuple(value.tolist()) for value in values]
        pairs = zip(got, wanted, strict=True)
        require(all(right is None or left == right for left, right in pairs), f"{got} was returned, not {wanted}")

    def stumble(self, ids: list[int] | None) -> None:
        """Call a method that raises."""
        for env in self._callable(ids)[:1]:
            env.is_called = True
            self.calls.lines.append(f"pool.call('stumble', env_ids=[{env.env_id}])  # raises")
            try:
                self.pool.call("stumble", env_ids=[env.env_id])
            except (EnvError, WorkerDied) as error:
                if not isinstance(error, EnvError) or error.phase != "call":
                    self.calls.adopt({})
                    self.calls.check_error(error, None)
            else:
                require(False, "a call that raises has returned")

    def set_level(self, ids: list[int] | None, levels: Any) -> None:
        """Set an attribute that all further observations show; repeat it if it was interrupted."""
        envs = self._callable(ids)
        if self.setup.num_spares or not isinstance(levels, list):
            levels, envs = (
                levels[0] if isinstance(levels, list) else levels,
                self._callable(None) if self.setup.num_spares else envs,
            )
        if not envs:
            return
        to = self.calls.ids(envs)
        values = [levels[env.env_id] for env in envs] if isinstance(levels, list) else levels
        for _ in range(MAX_REPAIRS):
            outcome = self.calls.make(
                f"pool.set_attr('level', {values!r}, env_ids={to})",
                lambda: self.pool.set_attr("level", values, env_ids=to),
            )
            if outcome is None:
                break
            for place, env in enumerate(envs):
                own = values[place] if isinstance(values, list) else values
                env.rows[0].object.set_level(own, is_certain=False)
            self._commands.reset(None)
        require(outcome is None, "an attribute could not be set")
        for env in self.model.envs if self.setup.num_spares else envs:
            env.is_called = True
            env.rows[0].object.set_level(levels[env.env_id] if isinstance(levels, list) else levels)
        if self.setup.num_spares:
            for each in self.model.objects:
                each.set_level(levels)

    def get_level(self, ids: list[int] | None) -> None:
        envs = self._callable(ids)
        if envs:
            to = self.calls.ids(envs)
            levels = self.calls.request(
                "get", f"pool.get_attr('level', env_ids={to})", lambda: self.pool.get_attr("level", env_ids=to)
            )
            wanted = tuple(env.rows[0].object.level for env in envs)
            require(isinstance(levels, BaseException) or levels == wanted, f"the levels are {levels}, not {wanted}")

    def observe(self, ids: list[int] | None) -> None:
        """Ask for the newest observations that were received."""
        envs = [env for env in self.calls.envs(ids) if not (env.is_loose or env.is_pending) and env.status != FAULTED]
        if envs and self.setup.kind != "agents":
            to = [env.env_id for env in envs]
            seen = self.calls.request(
                "observe", f"PoolPort(pool).observe({to})", lambda: PoolPort(self.pool).observe(to)
            )
            wanted = [list(row.place.obs) for env in envs for row in env.rows]
            require(isinstance(seen, BaseException) or seen.tolist() == wanted, f"{seen} was observed, not {wanted}")
