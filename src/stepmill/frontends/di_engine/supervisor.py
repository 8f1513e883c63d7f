"""`EnvSupervisor`: DI-engine's newer manager, over processes or threads, with blocking and non-blocking calls.

queue of each env ─► _send_next_command ─► PoolClient ─► _handle_reply ─┬► received payloads ─► recv, recv_all
       ▲                                                                └► a failed reset is repeated; a failed step and the
       └──────────────────────────────────────────────────────────────────  end of an episode are followed by a reset
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from stepmill.envs.di_engine_managed import ManagedSettings
from stepmill.frontends.di_engine import config as settings
from stepmill.frontends.di_engine.env_calls import EnvCalls
from stepmill.frontends.di_engine.env_lifecycle import EnvState
from stepmill.frontends.di_engine.errors import (
    ManagerClosedError,
    ManagerUsageError,
    RetriesError,
    as_payload_error,
    without_traceback,
)
from stepmill.frontends.di_engine.payloads import ChildType, RecvPayload, SendPayload
from stepmill.frontends.di_engine.pool_client import EnvReply, PoolClient, PoolClientSettings, ReplyKind
from stepmill.frontends.di_engine.trees import as_identifier, make_tree, stack_trees
from stepmill.frontends.overrides import refuse_overrides
from stepmill.spec.errors import RecvTimeout, StepmillError, UsageError
from stepmill.spec.options import BackendName, OptionKeywords, pop_options

SLICE_S = 10.0  # a wait without a deadline wakes up this often
logger = logging.getLogger("stepmill.di_engine")


class _CommandQueues(EnvCalls):
    """The part of a supervisor that queues the requests of each env, one command at a time, and handles the replies."""

    _running: bool
    _retry_type: str
    _max_try: int
    _auto_reset: bool
    _retry_waiting_time: float | None
    _episode_num: float
    NOT_CALLED = settings.NOT_CALLED_BY_SUPERVISOR

    def _init_states(self) -> None:
        self._env_seed: dict[int, int] = {}
        self._env_dynamic_seed: bool | None = None
        self._env_replay_path: list[str] | None = None
        self._env_states: dict[int, EnvState] = {}
        self._reset_param: dict[int, dict[str, Any]] = {}
        self._ready_obs: dict[int, Any] = {}
        self._env_episode_count = dict.fromkeys(range(self._env_num), 0)
        self._attempts: dict[int, int] = {}
        self._retry_at: dict[int, float] = {}  # by env whose reset has failed: when to try it again
        self._needs_renewal: set[int] = set()
        self._queues: dict[int, deque[SendPayload]] = {env_id: deque() for env_id in range(self._env_num)}
        self._running_commands: dict[int, SendPayload] = {}
        self._received: deque[RecvPayload] = deque()

    # ---- commands and replies ----------------------------------------------------------------------------------------

    def _send_next_command(self, env_id: int) -> None:
        """Send an env its next request, if it executes none."""
        queue = self._queues[env_id]
        while queue and env_id not in self._running_commands:
            payload = queue.popleft()
            if payload.method == "step":
                self._running_commands[env_id] = payload
                self._open_client().send_steps({env_id: payload.args[0]})
            elif payload.method == "reset":
                self._running_commands[env_id] = payload
                self._send_reset(env_id, payload)
            else:
                self._received.append(self._do_call(payload))

    def _send_reset(self, env_id: int, payload: SendPayload) -> None:
        request: dict[str, Any] = {"param": payload.kwargs}
        seed = self._env_seed.get(env_id)
        if seed is not None and (env_id not in self._env_states or env_id in self._attempts):
            request["seed"] = (seed, self._env_dynamic_seed)
        client = self._open_client()
        client.send_reset(env_id, request, is_renewal=env_id in self._needs_renewal)

    def _do_call(self, payload: SendPayload) -> RecvPayload:
        name = str(payload.method)
        made = RecvPayload(payload.proc_id, payload.req_id, payload.method)
        try:
            made.data = self.call(name, *payload.args, env_ids=[payload.proc_id], **payload.kwargs)[payload.proc_id]
        except StepmillError as error:
            made.err = error
        return made

    def _receive(self, timeout_s: float) -> None:
        """Wait for replies, handle them, and begin the attempts at resets that are due."""
        client = self._open_client()
        wait_s = min([timeout_s, *(max(0.0, retry_at - time.monotonic()) for retry_at in self._retry_at.values())])
        if self._retry_at and not client.pending:
            time.sleep(wait_s)  # no command is outstanding, so no event can end this wait earlier
        else:
            for reply in client.receive(1, wait_s):
                if self._running:
                    self._handle_reply(reply)
        for env_id in [env_id for env_id, retry_at in self._retry_at.items() if retry_at <= time.monotonic()]:
            del self._retry_at[env_id]
            self._send_reset(env_id, self._running_commands[env_id])

    def _wait_until_idle(self, env_ids: Mapping[int, Any]) -> None:
        """Wait until these envs execute nothing: the resets that follow their steps have ended."""
        while any(env_id in self._running_commands for env_id in env_ids):
            self._receive(SLICE_S)
        for payload in [one for one in self._received if one.method == "reset" and one.proc_id in env_ids]:
            self._received.remove(payload)

    def _handle_reply(self, reply: EnvReply) -> None:
        env_id, kind, value, command = reply
        sent = self._running_commands.pop(env_id)
        made = RecvPayload(env_id, sent.req_id, sent.method)
        if kind is ReplyKind.FAULT:
            made.err = as_payload_error(value)
            self._env_states[env_id] = EnvState.ERROR
            if command is ReplyKind.RESET:
                self._retry(env_id, sent, made.err)
                return
            info = {"abnormal": True, "err": without_traceback(made.err)}
            made.data = make_tree({"obs": None, "reward": None, "done": None, "info": info, "env_id": env_id})
            self._reset_again(env_id)
        elif kind is ReplyKind.RESET:
            self._env_states[env_id] = EnvState.RUN
            self._attempts.pop(env_id, None)
            self._needs_renewal.discard(env_id)
            self._ready_obs[env_id] = made.data = value
        else:
            made.data = self._end_step(env_id, value)
        self._received.append(made)
        self._send_next_command(env_id)

    def _end_step(self, env_id: int, timestep: Any) -> Any:
        obs, reward, done, info, *_ = timestep
        self._ready_obs[env_id] = obs
        if done:
            self._env_states[env_id] = EnvState.DONE
            self._env_episode_count[env_id] += 1
            if self._auto_reset and self._env_episode_count[env_id] < self._episode_num:
                self._reset_again(env_id)
        named = {as_identifier(key): value for key, value in info.items()}
        return make_tree({"obs": obs, "reward": reward, "done": done, "info": named, "env_id": env_id})

    def _reset_again(self, env_id: int) -> None:
        payload = SendPayload(env_id, method="reset", kwargs=self._reset_param.get(env_id) or {})
        self._queues[env_id].appendleft(payload)

    def _retry(self, env_id: int, sent: SendPayload, error: Exception) -> None:
        attempts = self._attempts[env_id] = self._attempts.get(env_id, 0) + 1
        if attempts >= self._max_try:
            self.shutdown()
            text = f"Env {env_id} reset has exceeded max_try({self._max_try}), and the latest exception is: {error}"
            raise RetriesError(text, env_id=env_id, phase="reset", error_type=type(error).__name__) from error
        if self._retry_type == "renew":
            self._needs_renewal.add(env_id)
        self._running_commands[env_id] = sent
        self._retry_at[env_id] = time.monotonic() + (self._retry_waiting_time or 0.0)

    # ---- questions about the envs ------------------------------------------------------------------------------------

    @property
    def method_name_list(self) -> list[str]:
        """Names of the methods that may be called."""
        return ["reset", "step", "seed", "close", "enable_save_replay"]

    @property
    def env_num(self) -> int:
        """The number of envs."""
        return self._env_num

    @property
    def observation_space(self) -> Any:
        """That of env 0; reading it starts the workers."""
        return self._spaces()[0]

    @property
    def action_space(self) -> Any:
        """That of env 0; reading it starts the workers."""
        return self._spaces()[1]

    @property
    def reward_space(self) -> Any:
        """That of env 0; reading it starts the workers."""
        return self._spaces()[2]

    def _spaces(self) -> tuple[Any, Any, Any]:
        self.start_link()
        assert self._client is not None
        return self._client.spaces

    @property
    def ready_obs(self) -> Any:
        """Observations of the envs that are in an episode, stacked in the order of their ids; empty if there are none."""
        return stack_trees([self._ready_obs.get(env_id) for env_id in self.ready_obs_id])

    @property
    def ready_obs_id(self) -> list[int]:
        """Envs that are in an episode."""
        return [env_id for env_id, state in self.env_states.items() if state is EnvState.RUN]

    @property
    def env_states(self) -> dict[int, EnvState]:
        """The state of each env, by env_id."""
        return {env_id: self._env_states.get(env_id, EnvState.VOID) for env_id in range(self._env_num)}

    def env_state_done(self, env_id: int) -> bool:
        """Whether an env's newest episode has ended."""
        return self.env_states[env_id] is EnvState.DONE

    @property
    def done(self) -> bool:
        """Whether all envs are DONE, and `recv` has returned all timesteps."""
        is_any_left = any(payload.method == "step" for payload in self._received)
        return not is_any_left and all(state is EnvState.DONE for state in self.env_states.values())

    def get_child_attr(self, proc_id: int, key: str) -> Any:
        """Return an attribute of one env."""
        return self._ask("look_up", key, self.method_name_list, env_ids=[proc_id])[0][1]

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def start_link(self) -> None:
        """Start the workers."""
        raise NotImplementedError

    def shutdown(self, timeout: float | None = None) -> None:
        """End the envs."""
        raise NotImplementedError

    def _check_closed(self) -> None:
        if not self.__dict__.get("_running", False):
            raise ManagerClosedError("Supervisor is not running, please call start_link first!")

    def _ready_ids(self) -> list[int]:
        return self.ready_obs_id

    def _open_client(self) -> PoolClient:
        if self._client is None:
            raise ManagerClosedError("Env supervisor has closed.")
        return self._client


class EnvSupervisor(_CommandQueues):
    """A supervisor of envs in processes or threads, with the interface of DI-engine's class.

    A step that fails returns an abnormal timestep, and its env is reset; a reset that fails is tried `max_try` times. Requests
    to an env that executes a command are queued. Unlike in DI-engine, no env is built in this process to learn its spaces
    (D-B14), `recv` is refused if no reply can arrive, and it waits without polling (D-B17).

    Args:
        type_: processes or threads. A thread that hangs cannot be ended, nor its env reset: the supervisor closes.
        env_fn: functions that make the envs.
        retry_type: "reset", or "renew" for a new env.
        max_try: attempts at a reset; `max_retry` is its older name.
        auto_reset: reset an env whose episode ended, until it has finished `episode_num` episodes.
        **kwargs: reset_timeout, step_timeout: seconds; retry_waiting_time: seconds before another attempt; shared_memory,
            copy_on_get, episode_num and context as for the managers; and fields of PoolOptions by name.
    """

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
        self._client: PoolClient | None = None
        self._running = False
        self._type = ChildType(getattr(type_, "value", type_))
        self._env_fn = list(env_fn or ())
        self._env_num = len(self._env_fn)
        self._retry_type = getattr(retry_type, "value", retry_type)
        self._max_try = max_try or max_retry or 1
        self._auto_reset = auto_reset
        of_pool = cast("OptionKeywords", pop_options(kwargs))
        kwargs |= settings.settings_in(of_pool)
        self._options = settings.options_in(of_pool)
        self._num_workers: int | None = kwargs.pop("num_workers", None)
        self._linger: float = kwargs.pop("linger", 0.0)
        self._reset_timeout: float | None = kwargs.pop("reset_timeout", None)
        self._step_timeout: float | None = kwargs.pop("step_timeout", None)
        self._retry_waiting_time: float | None = kwargs.pop("retry_waiting_time", None)
        self._episode_num: float = kwargs.pop("episode_num", float("inf"))
        is_process = self._type is ChildType.PROCESS
        self._shared_memory = kwargs.pop("shared_memory", True) and is_process
        self._copy_on_get = kwargs.pop("copy_on_get", True)
        self._context = kwargs.pop("context", "fork")
        if kwargs:
            logger.warning("Unknown parameters on env supervisor: %s", sorted(kwargs))
        self._init_states()

    # ---- launch and close --------------------------------------------------------------------------------------------

    def start_link(self) -> None:
        """Start the workers, if they have not been started."""
        if self._client is None:
            is_process = self._type is ChildType.PROCESS
            client_settings = PoolClientSettings(
                backend=BackendName.PROCESS if is_process else BackendName.THREAD,
                options=self._options,
                managed=ManagedSettings(shared_memory=self._shared_memory, is_process=is_process),
                num_workers=self._num_workers,
                linger_s=self._linger,
                context=self._context,
                copy=self._copy_on_get,
                step_timeout_s=self._step_timeout,
                reset_timeout_s=self._reset_timeout,
            )
            self._client = PoolClient(self._env_fn, client_settings)

    def launch(self, reset_param: Any = None, block: bool = True) -> None:
        """Start the envs and reset them; with block=False `recv` returns their observations."""
        if not self.closed:
            raise ManagerUsageError("Please first close the env supervisor before launch it")
        if reset_param is not None and len(reset_param) != self._env_num:
            raise ManagerUsageError(f"reset_param has {len(reset_param)} entries for {self._env_num} envs")
        self.start_link()
        self._running = True
        try:
            if self._env_replay_path is not None:
                self._open_client().pool.set_attr("replay_path", list(self._env_replay_path))
            self.reset(reset_param, block=block)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self, timeout: float | None = None) -> None:
        """End the envs, in at most two seconds, independently of `timeout`. The supervisor can be launched again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        if self._running:
            self._running = False
            self._init_states()

    def close(self, timeout: float | None = None) -> None:
        """As `shutdown`."""
        self.shutdown(timeout)

    @property
    def closed(self) -> bool:
        """Whether the supervisor is closed, or not launched yet."""
        return not self._running

    # ---- requests ----------------------------------------------------------------------------------------------------

    def step(self, actions: Any, block: bool = True) -> list[Any] | None:
        """Step envs.

        Args:
            actions: by env_id, or a list for all.
            block: wait, and return one tree array per env, in the order of `actions`; otherwise `recv` returns them.
        """
        self._check_running()
        named = dict(enumerate(actions)) if isinstance(actions, (list, tuple)) else dict(actions)
        if not named:
            raise ManagerUsageError("Action is empty!")
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
            reset_param: by env_id, or a list for all envs, keyword arguments of the env's `reset`; None resets all without.
            block: wait; otherwise `recv` returns the observations.
        """
        self._check_running()
        param = reset_param or {env_id: {} for env_id in range(self._env_num)}
        named = dict(enumerate(param)) if isinstance(param, (list, tuple)) else dict(param)
        payloads = []
        for env_id, kwargs in named.items():
            if self._env_replay_path is not None and self.env_states[env_id] is EnvState.RUN:
                logger.warning("Please don't reset an unfinished env when you enable save replay, we just skip it")
                continue
            self._reset_param[env_id] = kwargs or self._reset_param.get(env_id) or {}
            payloads.append(SendPayload(env_id, method="reset", kwargs=self._reset_param[env_id]))
        for payload in payloads:
            self.send(payload)
        if block and payloads:
            self.recv_all(payloads, ignore_err=True)
            self._wait_until_idle(named)

    def send(self, payload: SendPayload) -> None:
        """Queue a request for an env: "step", "reset", or one of `method_name_list`."""
        self._check_running()
        self._queues[payload.proc_id].append(payload)
        self._send_next_command(payload.proc_id)

    def recv(self, ignore_err: bool = False) -> RecvPayload:
        """Wait for a reply, and return the oldest one.

        Args:
            ignore_err: skip steps that failed; otherwise they are returned with `err` and an abnormal timestep.
        Raises:
            RuntimeError: a reset has failed `max_try` times; the supervisor is closed.
            UsageError: no reply can arrive, because no env executes a command.
        """
        self._check_running()
        while True:
            while self._received:
                payload = self._received.popleft()
                if payload.err is None or not ignore_err:
                    return payload
            if not self._running_commands:
                raise UsageError(
                    "no env executes a command, so recv() would never return; call step() or reset() first"
                )
            self._receive(SLICE_S)

    def recv_all(
        self,
        send_payloads: Sequence[SendPayload],
        ignore_err: bool = False,
        callback: Callable[[RecvPayload, dict[str, SendPayload]], object] | None = None,
        timeout: float | None = None,
    ) -> list[RecvPayload]:
        """Wait for the replies to these requests, and return them in their order; `recv` returns the others later.

        Args:
            send_payloads: the requests.
            ignore_err: return errors in their payloads instead of raising them. A reply that does not arrive within
                `timeout` seconds is replaced by a payload with a TimeoutError.
            callback: called with each reply and the requests that remain.
            timeout: seconds; None waits without limit.
        """
        remain = {payload.req_id: payload for payload in send_payloads}
        found: dict[str, RecvPayload] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            for payload in [payload for payload in self._received if payload.req_id in remain]:
                self._received.remove(payload)
                del remain[str(payload.req_id)]
                found[str(payload.req_id)] = payload
                if payload.err is not None and not ignore_err:
                    raise payload.err
                if callback is not None:
                    callback(payload, remain)
            if not remain or not self._running_commands:
                break
            left_s = SLICE_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                self._handle_timeout(remain, found, timeout, ignore_err=ignore_err)
                break
            self._receive(min(left_s, SLICE_S))
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
        """Set the seeds of the first reset after `launch`; the arguments are those of the managers' `seed`."""
        self._env_seed = dict(settings.seeds_by_env(seed, self._env_num, "Invalid seed arguments type"))
        self._env_dynamic_seed = dynamic_seed

    def enable_save_replay(self, replay_path: Any) -> None:
        """Make each env save replays, from the next `launch` on."""
        self._env_replay_path = settings.replay_paths(replay_path, self._env_num)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if not self._running:
            raise ManagerClosedError("Env supervisor has closed.")
