"""The turns of a supervisor: each env does one thing after the other, and what follows of it by itself.

queue of each env ─► _advance ─► desk ─► _take ─┬► inbox
       ▲                                        └► failed reset: again · failed step, end of an episode: a reset
       └─────────────────────────────────────────────────┘
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from stepmill.frontends.di_engine.calls import EnvCalls
from stepmill.frontends.di_engine.desk import Answer, Desk, Kind
from stepmill.frontends.di_engine.errors import ManagerClosedError, RetriesError, detached, payload_error
from stepmill.frontends.di_engine.payloads import RecvPayload, SendPayload
from stepmill.frontends.di_engine.states import EnvState
from stepmill.frontends.di_engine.trees import as_identifier, make_tree, stack_trees
from stepmill.spec.errors import StepmillError

SLICE_S = 10.0


class Supervised(EnvCalls):
    """The part of a supervisor that deals with commands and answers."""

    _running: bool
    _retry_type: str
    _max_try: int
    _auto_reset: bool
    _retry_waiting_time: float | None
    _episode_num: float

    def _init_states(self) -> None:
        self._env_seed: dict[int, int | None] = {}
        self._env_dynamic_seed: bool | None = None
        self._env_replay_path: list[str] | None = None
        self._env_states: dict[int, EnvState] = {}
        self._reset_param: dict[int, dict[str, Any]] = {}
        self._ready_obs: dict[int, Any] = {}
        self._env_episode_count = dict.fromkeys(range(self._env_num), 0)
        self._attempts: dict[int, int] = {}
        self._to_renew: set[int] = set()
        self._queues: dict[int, deque[SendPayload]] = {env_id: deque() for env_id in range(self._env_num)}
        self._at_work: dict[int, SendPayload] = {}
        self._inbox: deque[RecvPayload] = deque()

    # ---- turns ---------------------------------------------------------------------------------------------------

    def _advance(self, env_id: int) -> None:
        """Give an env that is free its next command."""
        queue = self._queues[env_id]
        while queue and env_id not in self._at_work:
            payload = queue.popleft()
            if payload.method == "step":
                self._at_work[env_id] = payload
                for answer in self._live_desk().send_steps({env_id: payload.args[0]}):
                    self._take(answer)
            elif payload.method == "reset":
                self._at_work[env_id] = payload
                self._send_reset(env_id, payload)
            else:
                self._inbox.append(self._do_call(payload))

    def _send_reset(self, env_id: int, payload: SendPayload) -> None:
        told: dict[str, Any] = {"param": payload.kwargs}
        seed = self._env_seed.get(env_id)
        if seed is not None and (env_id not in self._env_states or env_id in self._attempts):
            told["seed"] = (seed, self._env_dynamic_seed)
        desk = self._live_desk()
        answer = desk.send_renewal(env_id, told) if env_id in self._to_renew else desk.send_reset(env_id, told)
        if answer is not None:
            self._take(answer)

    def _do_call(self, payload: SendPayload) -> RecvPayload:
        name = str(payload.method)
        made = RecvPayload(payload.proc_id, payload.req_id, payload.method)
        try:
            made.data = self.call(name, *payload.args, env_ids=[payload.proc_id], **payload.kwargs)[payload.proc_id]
        except StepmillError as error:
            made.err = error
        return made

    def _receive(self, timeout_s: float) -> None:
        for answer in self._live_desk().receive(1, timeout_s):
            if self._running:
                self._take(answer)

    def _settle(self, env_ids: Mapping[int, Any]) -> None:
        """Wait until these envs are free: resets that follow their steps are done."""
        while any(env_id in self._at_work for env_id in env_ids):
            self._receive(SLICE_S)
        for payload in [one for one in self._inbox if one.method == "reset" and one.proc_id in env_ids]:
            self._inbox.remove(payload)

    def _take(self, answer: Answer) -> None:
        env_id, kind, value, of = answer
        sent = self._at_work.pop(env_id)
        made = RecvPayload(env_id, sent.req_id, sent.method)
        if kind is Kind.FAULT:
            made.err = payload_error(value)
            self._env_states[env_id] = EnvState.ERROR
            if of is Kind.RESET:
                self._retry(env_id, sent, made.err)
                return
            info = {"abnormal": True, "err": detached(made.err)}
            made.data = make_tree({"obs": None, "reward": None, "done": None, "info": info, "env_id": env_id})
            self._reset_again(env_id)
        elif kind is Kind.RESET:
            self._env_states[env_id] = EnvState.RUN
            self._attempts.pop(env_id, None)
            self._to_renew.discard(env_id)
            self._ready_obs[env_id] = made.data = value
        else:
            made.data = self._end_step(env_id, value)
        self._inbox.append(made)
        self._advance(env_id)

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
            raise RetriesError(
                f"Env {env_id} reset has exceeded max_try({self._max_try}), and the latest exception is: {error}",
                env_id=env_id,
                phase="reset",
                error_type=type(error).__name__,
            ) from error
        if self._retry_waiting_time:
            time.sleep(self._retry_waiting_time)
        if self._retry_type == "renew":
            self._to_renew.add(env_id)
        self._queues[env_id].appendleft(sent)
        self._advance(env_id)

    # ---- what can be asked ---------------------------------------------------------------------------------------

    @property
    def method_name_list(self) -> list[str]:
        """Methods of the envs that may be called."""
        return ["reset", "step", "seed", "close", "enable_save_replay"]

    @property
    def env_num(self) -> int:
        """How many envs there are."""
        return self._env_num

    @property
    def observation_space(self) -> Any:
        """Of one env, as the env has it; the workers are started for it."""
        return self._spaces()[0]

    @property
    def action_space(self) -> Any:
        """Of one env, as the env has it."""
        return self._spaces()[1]

    @property
    def reward_space(self) -> Any:
        """Of one env, as the env has it."""
        return self._spaces()[2]

    def _spaces(self) -> tuple[Any, Any, Any]:
        self.start_link()
        assert self._desk is not None
        return self._desk.spaces

    @property
    def ready_obs(self) -> Any:
        """Observations of the envs that are in an episode, stacked, in the order of their ids; maybe none."""
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
        """Whether an env's newest episode is over."""
        return self.env_states[env_id] is EnvState.DONE

    @property
    def done(self) -> bool:
        """Whether all envs are DONE, and no timestep of theirs waits for `recv`."""
        is_any_left = any(payload.method == "step" for payload in self._inbox)
        return not is_any_left and all(state is EnvState.DONE for state in self.env_states.values())

    def get_child_attr(self, proc_id: int, key: str) -> Any:
        """Return an attribute of one env."""
        return self._ask("look_up", key, self.method_name_list, env_ids=[proc_id])[0][1]

    # ---- inner ---------------------------------------------------------------------------------------------------

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

    def _live_desk(self) -> Desk:
        if self._desk is None:
            raise ManagerClosedError("Env supervisor has closed.")
        return self._desk
