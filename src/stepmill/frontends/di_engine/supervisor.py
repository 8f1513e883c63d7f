"""`EnvSupervisor`: DI-engine's newer manager, over processes or threads, with blocking and non-blocking calls.

queue of each env ─► _send_next_command ─► PoolClient ─► EnvLifecycle ─┬► received payloads ─► recv, recv_all
       ▲                                                               └► a failed reset is repeated; a failed step and the
       └─────────────────────────────────────────────────────────────────  end of an episode are followed by a reset
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from stepmill.frontends.di_engine import config as settings
from stepmill.frontends.di_engine.env_calls import BASIC_METHODS, EnvCalls
from stepmill.frontends.di_engine.env_lifecycle import EnvState
from stepmill.frontends.di_engine.errors import (
    ManagerUsageError,
    as_payload_error,
    without_traceback,
)
from stepmill.frontends.di_engine.pool_client import Command, EnvReply, PoolClient
from stepmill.frontends.di_engine.trees import as_identifier, make_tree, stack_trees
from stepmill.frontends.overrides import refuse_overrides
from stepmill.spec.closing import close_on_error
from stepmill.spec.errors import RecvTimeout, StepmillError, UsageError
from stepmill.spec.options import BackendName, OptionKeywords, pop_options

logger = logging.getLogger("stepmill.di_engine")


class ChildType(Enum):
    """Where envs run; members of DI-engine's enum of that name are accepted, too."""

    PROCESS = "process"  #: In worker processes.
    THREAD = "thread"  #: In threads of the calling process.


@dataclass
class SendPayload:
    """A request to one env."""

    proc_id: int
    req_id: str = field(default_factory=lambda: uuid.uuid1().hex)
    method: str | None = None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecvPayload:
    """The reply to a request: `data`, or `err` and, for a step, an abnormal timestep as `data`."""

    proc_id: int
    req_id: str | None = None
    method: str | None = None
    data: Any = None
    err: Exception | None = None
    extra: Any = None


class EnvSupervisor(EnvCalls):
    """A supervisor of envs in processes or threads, with the interface of DI-engine's class.

    A step that fails returns an abnormal timestep, and its env is reset. A reset that fails is tried `max_try` times.
    Requests to an env that executes a command are queued. Unlike in DI-engine, no env is built in this process to learn
    its spaces, `recv` is refused if no reply can arrive, and it waits without polling.

    Args:
        type_: processes or threads. If a thread hangs, it cannot be ended and its env cannot be reset, so the
            supervisor closes.
        env_fn: functions that make the envs.
        retry_type: "reset", or "renew" for a new env.
        max_try: the number of attempts at a reset. `max_retry` is the older name of this argument.
        auto_reset: whether an env whose episode ended is reset, until it has finished `episode_num` episodes.
        **kwargs: reset_timeout, step_timeout: seconds; retry_waiting_time: seconds before another attempt; shared_memory,
            copy_on_get, episode_num and context as for the managers; and fields of PoolOptions by name.
    """

    NOT_CALLED = settings.NOT_CALLED_BY_SUPERVISOR
    _attempts_name = "max_try"
    _closed_text = "Env supervisor has closed."
    _closed_attribute_text = "Supervisor is not running, please call start_link first!"
    _forgets_seeds = False

    def __init__(
        self,
        type_: Any = ChildType.PROCESS,
        env_fn: Sequence[Callable[[], Any]] | None = None,
        retry_type: str = "reset",
        max_try: int | None = None,
        max_retry: int | None = None,
        auto_reset: bool = True,
        **kwargs: Any,
    ) -> None:
        refuse_overrides(type(self))
        self._type = ChildType(getattr(type_, "value", type_))
        of_pool = cast("OptionKeywords", pop_options(kwargs))
        kwargs |= settings.settings_in(of_pool)
        if unknown := sorted(kwargs.keys() - settings.SUPERVISOR.keys()):
            logger.warning("Unknown parameters on env supervisor: %s", unknown)
        cfg = settings.with_defaults(kwargs, settings.SUPERVISOR)
        cfg.retry_type, cfg.auto_reset = getattr(retry_type, "value", retry_type), auto_reset
        cfg.max_retry, cfg.retry_waiting_time = max_try or max_retry or 1, cfg.retry_waiting_time or 0.0
        super().__init__(env_fn or (), cfg, settings.options_in(of_pool))

    def _init_states(self) -> None:
        super()._init_states()
        self._queues: dict[int, deque[SendPayload]] = {env_id: deque() for env_id in range(self._env_num)}
        self._running_commands: dict[int, SendPayload] = {}
        self._received: deque[RecvPayload] = deque()

    # ---- launch and close --------------------------------------------------------------------------------------------

    def start_link(self) -> None:
        """Start the workers, if they have not been started."""
        self._start()

    def _make_client(self) -> PoolClient:
        return self._make_client_of_workers(BackendName(self._type.value), reset_timeout_s=self._cfg.reset_timeout)

    def launch(self, reset_param: Any = None, block: bool = True) -> None:
        """Start the envs and reset them; with block=False `recv` returns their observations."""
        if not self.closed:
            raise ManagerUsageError("Please first close the env supervisor before launch it")
        if reset_param is not None and len(reset_param) != self._env_num:
            raise ManagerUsageError(f"reset_param has {len(reset_param)} entries for {self._env_num} envs")
        client = self._start()
        with close_on_error(self.shutdown):
            self._open(client)
            self.reset(reset_param, block=block)

    def shutdown(self, timeout: float | None = None) -> None:
        """Close the envs in at most two seconds, independently of `timeout`. The supervisor can be launched again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        if not self._closed:
            self._closed = True
            self._init_states()

    def close(self, timeout: float | None = None) -> None:
        """Do the same as `shutdown`."""
        self.shutdown(timeout)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def step(self, actions: Any, block: bool = True) -> list[Any] | None:
        """Step envs.

        Args:
            actions: a mapping by env_id, or a list for all envs.
            block: True waits, and returns one tree array per env, in the order of `actions`; otherwise `recv` returns them.
        """
        self._check_closed()
        named = dict(enumerate(actions)) if isinstance(actions, (list, tuple)) else dict(actions or {})
        if not named:
            raise ManagerUsageError("Action is empty!")
        self._check_ids(named)
        payloads = [SendPayload(env_id, method="step", args=[action]) for env_id, action in named.items()]
        for payload in payloads:
            self.send(payload)
        if not block:
            return None
        data = [payload.data for payload in self.recv_all(payloads, ignore_err=True)]
        self._wait_until_idle(named)
        return data

    def reset(self, reset_param: Any = None, block: bool = True) -> None:
        """Reset envs.

        Args:
            reset_param: keyword arguments of the envs' `reset`, by env_id or as a list for all envs. None resets all
                without arguments.
            block: True waits; otherwise `recv` returns the observations.
        """
        self._check_closed()
        param = reset_param or {env_id: {} for env_id in range(self._env_num)}
        named = dict(enumerate(param)) if isinstance(param, (list, tuple)) else dict(param)
        self._check_ids(named)
        payloads = []
        for env_id, kwargs in named.items():
            if self._env_replay_path is not None and self._env_states[env_id] is EnvState.RUN:
                logger.warning("Please don't reset an unfinished env when you enable save replay, we just skip it")
                continue
            self._reset_param[env_id] = given = kwargs or self._reset_param[env_id] or {}
            payloads.append(SendPayload(env_id, method="reset", kwargs=given))
        for payload in payloads:
            self.send(payload)
        if block and payloads:
            self.recv_all(payloads, ignore_err=True)
            self._wait_until_idle(named)

    def send(self, payload: SendPayload) -> None:
        """Queue a request for an env: "step", "reset", or one of `method_name_list`."""
        self._check_closed()
        self._check_ids([payload.proc_id])
        self._queues[payload.proc_id].append(payload)
        self._send_next_command(payload.proc_id)

    def recv(self, ignore_err: bool = False) -> RecvPayload:
        """Wait for a reply, and return the oldest one.

        Args:
            ignore_err: True skips steps that failed; otherwise they are returned with `err` and an abnormal timestep.
        Raises:
            RuntimeError: a reset has failed `max_try` times; the supervisor is closed.
            UsageError: no reply can arrive, because no env executes a command.
        """
        self._check_closed()
        while True:
            self._process_replies(lambda: not self._received)
            if not self._received:
                raise UsageError(
                    "no env executes a command, so recv() would never return; call step() or reset() first"
                )
            payload = self._received.popleft()
            if payload.err is None or not ignore_err:
                return payload

    def recv_all(
        self,
        send_payloads: Sequence[SendPayload],
        ignore_err: bool = False,
        callback: Callable[[RecvPayload, dict[str, SendPayload]], object] | None = None,
        timeout: float | None = None,
    ) -> list[RecvPayload]:
        """Wait for the replies to these requests, and return them in the order of the requests; `recv` returns other replies later.

        Args:
            send_payloads: the requests.
            ignore_err: True returns errors in their payloads instead of raising them. A reply that does not arrive within
                `timeout` seconds is replaced by a payload with a TimeoutError.
            callback: called with each reply and the requests that remain.
            timeout: seconds; None waits without limit.
        """
        remain = {payload.req_id: payload for payload in send_payloads}
        found: dict[str, RecvPayload] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        while remain:
            self._process_replies(
                lambda: all(payload.req_id not in remain for payload in self._received), until=deadline
            )
            arrived = [payload for payload in self._received if payload.req_id in remain]
            for payload in arrived:
                self._received.remove(payload)
                del remain[str(payload.req_id)]
                found[str(payload.req_id)] = payload
                if payload.err is not None and not ignore_err:
                    raise payload.err
                if callback is not None:
                    callback(payload, remain)
            if not arrived:
                if self._running_commands:
                    self._handle_timeout(remain, found, timeout, ignore_err=ignore_err)
                break
        return [found[payload.req_id] for payload in send_payloads if payload.req_id in found]

    def _handle_timeout(
        self,
        remain: Mapping[str, SendPayload],
        found: dict[str, RecvPayload],
        timeout: float | None,
        *,
        ignore_err: bool,
    ) -> None:
        ids = [one.proc_id for one in remain.values()]
        text = f"envs {ids} did not reply within {timeout} s; nothing is lost, a later recv() returns the replies"
        error = RecvTimeout(text, timeout_s=timeout or 0.0)
        if not ignore_err:
            raise error
        for req_id, sent in remain.items():
            found[req_id] = RecvPayload(sent.proc_id, req_id, sent.method, err=error)

    def seed(self, seed: Mapping[int, int] | list[int] | int, dynamic_seed: bool | None = None) -> None:
        """Set seeds, which are sent with the next reset of each env; the arguments are those of the managers' `seed`."""
        given = settings.seeds_by_env(seed, self._env_num, "Invalid seed arguments type")
        self._env_seed = {**dict.fromkeys(range(self._env_num)), **given}
        for env_id in given:
            self._last_sent_seed.pop(env_id, None)
        self._env_dynamic_seed = dynamic_seed

    # ---- commands and replies ----------------------------------------------------------------------------------------

    def _send_next_command(self, env_id: int) -> None:
        """Send an env its next request, if it executes none."""
        queue = self._queues[env_id]
        while queue and env_id not in self._running_commands:
            payload = queue.popleft()
            if payload.method == "step":
                self._open_client().send_steps({env_id: payload.args[0]})  # an env whose episode is over raises
                self._running_commands[env_id] = payload
            elif payload.method == "reset":
                self._running_commands[env_id] = payload
                self._begin_reset(env_id)
            else:
                self._received.append(self._do_call(payload))

    def _do_call(self, payload: SendPayload) -> RecvPayload:
        name = str(payload.method)
        made = RecvPayload(payload.proc_id, payload.req_id, payload.method)
        try:
            made.data = self.call(name, *payload.args, env_ids=[payload.proc_id], **payload.kwargs)[payload.proc_id]
        except StepmillError as error:
            made.err = error
        return made

    def _param_of(self, env_id: int) -> dict[str, Any] | None:
        return self._running_commands[env_id].kwargs

    def _handle_reply(self, reply: EnvReply) -> None:
        super()._handle_reply(reply)
        if reply.command is Command.RESET and not isinstance(reply.value, StepmillError):
            self._answer(reply.env_id, reply.value)

    def _handle_reset_failure(self, env_id: int, error: StepmillError) -> None:
        self._env_states.move(env_id, EnvState.ERROR)
        super()._handle_reset_failure(env_id, error)

    def _handle_result(self, env_id: int, value: Any) -> None:
        if not isinstance(value, StepmillError):
            self._answer(env_id, self._end_step(env_id, value))
            return
        self._env_states.move(env_id, EnvState.ERROR)
        error = as_payload_error(value)
        info = {"abnormal": True, "err": without_traceback(error)}
        self._reset_again(env_id)
        self._answer(
            env_id, make_tree({"obs": None, "reward": None, "done": None, "info": info, "env_id": env_id}), error
        )

    def _answer(self, env_id: int, data: Any, error: StepmillError | None = None) -> None:
        """Store the reply to the command of an env, and send its next one."""
        sent = self._running_commands.pop(env_id)
        self._received.append(RecvPayload(env_id, sent.req_id, sent.method, data, error))
        self._send_next_command(env_id)

    def _end_step(self, env_id: int, timestep: Any) -> Any:
        obs, reward, done, info, *_ = timestep
        self._ready_obs[env_id] = obs
        if done:
            self._end_episode(env_id, timestep)
        named = {as_identifier(key): value for key, value in info.items()}
        return make_tree({"obs": obs, "reward": reward, "done": done, "info": named, "env_id": env_id})

    def _end_episode(self, env_id: int, timestep: Any) -> None:
        self._env_states.move(env_id, EnvState.DONE)
        self._env_episode_count[env_id] += 1
        if self._cfg.auto_reset and self._env_episode_count[env_id] < self._episode_num:
            self._reset_again(env_id)

    def _reset_again(self, env_id: int) -> None:
        payload = SendPayload(env_id, method="reset", kwargs=self._reset_param[env_id] or {})
        self._queues[env_id].appendleft(payload)

    def _wait_until_idle(self, env_ids: Mapping[int, Any]) -> None:
        """Wait until these envs execute nothing, so that the resets that follow their steps have ended."""
        self._process_replies(lambda: any(env_id in self._running_commands for env_id in env_ids))
        for payload in [one for one in self._received if one.method == "reset" and one.proc_id in env_ids]:
            self._received.remove(payload)

    # ---- questions about the envs ------------------------------------------------------------------------------------

    @property
    def method_name_list(self) -> list[str]:
        """Names of the methods that may be called."""
        return list(BASIC_METHODS)

    @property
    def ready_obs(self) -> Any:
        """Observations of the envs that are in an episode, stacked in the order of their ids; empty if there are none."""
        return stack_trees([self._ready_obs.get(env_id) for env_id in self.ready_obs_id])

    @property
    def ready_obs_id(self) -> list[int]:
        """Envs that are in an episode."""
        return self._env_states.ids_in(EnvState.RUN)

    @property
    def env_states(self) -> dict[int, EnvState]:
        """The state of each env, by env_id."""
        return dict(self._env_states)

    @property
    def done(self) -> bool:
        """Whether all envs are DONE, and `recv` has returned all timesteps."""
        is_any_left = any(payload.method == "step" for payload in self._received)
        return not is_any_left and all(state is EnvState.DONE for state in self._env_states.values())

    def get_child_attr(self, proc_id: int, key: str) -> Any:
        """Return an attribute of one env.

        Raises:
            IndexError, AttributeError: there is no such env, or attribute.
        """
        return self._attributes(key, [proc_id])[0]

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _ready_ids(self) -> list[int]:
        return self.ready_obs_id
