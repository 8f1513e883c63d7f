"""`PoolClient`: sends a manager's commands to its pool by env_id, and returns one reply per command. It has no policy.

send_steps, send_reset ──► pool ──► receive ──► EnvReply(env_id, kind, value)
                                                  STEP   the timestep
                                                  RESET  the first observation
                                                  FAULT  the error, of a step or a reset
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

import cloudpickle

from stepmill.envs.di_engine_managed import ManagedEnvMaker, ManagedSettings
from stepmill.frontends.di_engine.errors import TornError
from stepmill.frontends.di_engine.timestep_codec import TimestepDecoder
from stepmill.pool.pool import Pool
from stepmill.spec.batch import Batch
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import AutoresetMode, BackendName, EnvState, PoolOptions


class ReplyKind(IntEnum):
    """The content of a reply. A command is STEP or RESET, which is the content of its reply if nothing fails."""

    STEP = 0
    RESET = 1
    FAULT = 2


class EnvReply(NamedTuple):
    """The reply of one env to a command; `command` is STEP or RESET."""

    env_id: int
    kind: ReplyKind
    value: Any
    command: ReplyKind


class PoolClient:
    """Sends commands to the envs of a pool, at most one per env at a time.

    Attributes:
        pending: the command of each env that has not replied yet.
        spaces: observation, action and reward space of env 0.
        envs: the env objects by env_id, if they run in the caller's thread.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], object]],
        options: PoolOptions,
        managed: ManagedSettings,
        linger_s: float = 0.0,
    ) -> None:
        """Start the envs.

        Args:
            env_fns: the functions that make the envs.
            options: the options of the pool. Unless its autoreset mode is SAME_STEP, no env resets itself.
            managed: settings for each env.
            linger_s: how long the pool waits for more replies when enough have come.
        """
        self.envs: dict[int, object] = {}
        sink = self.envs if options.backend is BackendName.SERIAL else None
        makers = [ManagedEnvMaker(env_fn, env_id, managed, sink) for env_id, env_fn in enumerate(env_fns)]
        if options.autoreset_mode is not AutoresetMode.SAME_STEP:
            options = replace(options, autoreset_mode=AutoresetMode.DISABLED)
        self.pool = Pool(makers, options=replace(options, episode_stats=False))
        self._linger_s = linger_s
        self.spaces: tuple[Any, Any, Any] = cloudpickle.loads(self.pool.spec.spaces)
        self.pending: dict[int, ReplyKind] = {}
        self._has_own_process = options.backend is BackendName.PROCESS and self.pool.num_workers == self.pool.num_envs
        self._decoder = TimestepDecoder(self.pool.spec.observation)
        self._lost_envs: dict[int, StepmillError] = {}  # by env without a command: why it needs a reset

    def close(self) -> None:
        """End the envs. Idempotent."""
        self.pending.clear()
        self.pool.close()

    # ---- commands ----------------------------------------------------------------------------------------------------

    def send_steps(self, actions: Mapping[int, Any]) -> None:
        """Send each env its action. Envs whose worker has died get none: `receive` returns their faults."""
        wanted = {env_id: action for env_id, action in actions.items() if env_id not in self._lost_envs}
        if len(wanted) == self.pool.num_envs:  # without a list of ids, the pool uses its fastest path
            self.pool.send([wanted[env_id] for env_id in range(len(wanted))])
        elif wanted:
            self.pool.send(list(wanted.values()), list(wanted))
        self.pending.update(dict.fromkeys(actions, ReplyKind.STEP))

    def send_reset(self, env_id: int, request: dict[str, Any], *, is_renewal: bool = False) -> None:
        """Begin to reset an env; the result of an earlier command is dropped.

        Args:
            env_id: the env.
            request: the options of `ManagedEnv.reset`.
            is_renewal: replace the env by a new one first; its process too, unless other envs share that.
        """
        renews_process = is_renewal and self._has_own_process
        if is_renewal and not renews_process:
            request = {**request, "renew": True}
        self.pending.pop(env_id, None)
        self._lost_envs.pop(env_id, None)
        try:
            if renews_process or self.pool.states[env_id] is EnvState.FAULTED:
                # Its worker starts while the other envs run.
                self.pool.revive([env_id], wait=False, restart_living=renews_process)
        except StepmillError as error:  # the env cannot be replaced, for example because its thread hangs
            self._lost_envs[env_id] = error
        else:
            self.pool.reset_async(env_ids=[env_id], options=request)
        self.pending[env_id] = ReplyKind.RESET

    # ---- replies -----------------------------------------------------------------------------------------------------

    def receive(self, least: int, timeout_s: float | None) -> list[EnvReply]:
        """Wait for replies, and return all that have arrived.

        Args:
            least: how many replies to wait for.
            timeout_s: seconds, after which the result is empty; 0 does not wait; None waits without limit.
        """
        lost = [(env_id, self._lost_envs[env_id]) for env_id in self.pending if env_id in self._lost_envs]
        if lost:
            return [EnvReply(env_id, ReplyKind.FAULT, error, self.pending.pop(env_id)) for env_id, error in lost]
        try:
            received = self.pool.receive(0 if timeout_s == 0 else least, None, timeout_s, self._linger_s)
        except StepmillError:
            raise
        except BaseException:
            self._drop_interrupted()
            raise
        replies = [] if received.batch is None else self._read_replies(received.batch)
        for env_id, fault in received.faults.items():
            command = self.pending.pop(env_id, None)
            if command is None:
                self._lost_envs[env_id] = fault.error
            else:
                replies.append(EnvReply(env_id, ReplyKind.FAULT, fault.error, command))
        return replies

    def _read_replies(self, batch: Batch) -> list[EnvReply]:
        kinds = [self.pending.pop(env_id, ReplyKind.STEP) for env_id in batch.env_id.tolist()]
        if ReplyKind.RESET not in kinds:
            values = self._decoder.read(batch)
        elif ReplyKind.STEP not in kinds:
            values = self._decoder.read_obs(batch)
        else:
            values = self._decoder.read_mixed(batch, [kind is ReplyKind.RESET for kind in kinds])
        return [
            EnvReply(env_id, ReplyKind.FAULT if isinstance(value, TornError) else kind, value, kind)
            for env_id, kind, value in zip(batch.env_id.tolist(), kinds, values, strict=True)
        ]

    def _drop_interrupted(self) -> None:
        """After Ctrl-C, drop the pending commands of envs that run in the caller's thread: these envs have a fault now."""
        for env_id, state in enumerate(self.pool.states):
            if state in (EnvState.FAULTED, EnvState.IDLE, EnvState.NEEDS_RESET):
                self.pending.pop(env_id, None)
