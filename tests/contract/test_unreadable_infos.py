"""Infos that cannot be read, merged or pickled: a fault of their env, raised once, which hides no other result."""

from __future__ import annotations

import ctypes
import gc
import logging
import signal
import threading
import weakref
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.pool.events import EnvFailed, FaultKind
from stepmill.pool.faults import fault_error
from stepmill.pool.infos import rows_of
from stepmill.pool.port import PoolPort
from stepmill.spec.errors import BadOutput, StepmillError
from stepmill.testing.envs import CountingEnv
from tests.harness.pools import await_ready, begun, make_pool

SHY, READABLE, OPAQUE = 1, 2, 3  # actions


class OwnError(BaseException):
    """No Exception, so that `except Exception` does not stop it."""


ERRORS: dict[str, type[BaseException]] = {
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "ValueError": ValueError,
    "OwnError": OwnError,
}
loads: list[Any] = []  # what the next unpickled `Shy` does: raise, or call


def _load(what: object) -> object:
    if isinstance(what, str):
        raise ERRORS[what]("not here")
    if loads:
        loads.pop(0)()
    return "read"


def _raise(error: BaseException) -> None:
    raise error


class Shy:
    """Raises when it is unpickled; with None it does what `loads` says."""

    def __init__(self, what: str | None) -> None:
        self.what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.what,)


class ShyEnv(CountingEnv):
    """Action SHY puts unreadable values into the info."""

    def __init__(self, identity: int = 0, what: str | None = "SystemExit", length: int = 5) -> None:
        super().__init__(identity, length)
        self.what = what

    def step(self, action: np.int64) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if action == SHY:
            info |= {"shy": Shy(self.what), "deep": {"a": 1, "shy": [0, Shy(self.what)]}}
        elif action == READABLE:
            info |= {"shy": "told", "deep": {"a": 2, "shy": [5]}}
        return obs, reward, terminated, truncated, info


@pytest.fixture(autouse=True)
def _no_loads_left():
    loads.clear()
    yield
    loads.clear()


def _two(what: str | None) -> list[Any]:
    return [lambda: ShyEnv(0, what), lambda: ShyEnv(1, what)]


@pytest.mark.parametrize("where", ["thread", "fork"])
@pytest.mark.parametrize("policy", ["raise", "truncate", "replay"])
@pytest.mark.parametrize("error", ERRORS)
def test_a_value_that_cannot_be_unpickled_is_left_out_and_named(pool_of, error, policy, caplog):
    with begun(pool_of(_two(error), on_fault=policy, seeding="per_episode")) as pool:
        batch = pool.step([READABLE, SHY])
        assert batch.info["t"].tolist() == [1, 1]
        assert batch.info["shy"].tolist() == ["told", None]
        assert batch.info["_shy"].tolist() == [True, False]
        assert batch.info["deep"]["a"].tolist() == [2, 1]
        assert batch.info["deep"]["_shy"].tolist() == [True, False]
        assert batch.info["omitted"][0] is None
        errors = batch.info["omitted"][1]
        assert [(type(each), each.env_id, each.leaf, each.phase) for each in errors] == [
            (BadOutput, 1, "info['shy']", "info"),
            (BadOutput, 1, "info['deep']['shy']", "info"),
        ]
        assert all(f"{error}: not here" in each.message for each in errors)
        assert isinstance(errors[0].__cause__, ERRORS[error])
        assert pool.step([READABLE, READABLE]).reward.tolist() == [READABLE, READABLE]
    if policy == "raise":
        assert [record.name for record in caplog.records] == ["stepmill"] * 2


def test_an_unreadable_value_is_logged_once_and_every_batch_names_it(pool_of, caplog):
    with begun(pool_of(_two("ValueError"))) as pool:
        for _ in range(3):
            batch = pool.step([SHY, SHY])
            assert [len(errors) for errors in batch.info["omitted"]] == [2, 2]
            assert batch.info["_omitted"].all()
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(texts) == 4
    assert "info['shy'] of env 1 cannot be read here: ValueError: not here" in "\n".join(texts)


def test_infos_one_by_one_name_what_cannot_be_read(pool_of):
    with begun(pool_of(_two("SystemExit"))) as pool:
        rows = dict(rows_of(pool.step([READABLE, SHY]).info))
        assert rows[0] == {"t": 1, "shy": "told", "deep": {"a": 2, "shy": [5]}}
        assert (rows[1]["t"], rows[1]["deep"]) == (1, {"a": 1})
        assert [error.leaf for error in rows[1]["omitted"]] == ["info['shy']", "info['deep']['shy']"]


def test_the_last_info_of_an_episode_names_what_of_it_cannot_be_read(pool_of):
    with begun(pool_of([lambda: ShyEnv(0, "OwnError", length=1)] * 2, autoreset_mode="SameStep")) as pool:
        info = pool.step([READABLE, SHY]).info
        assert info["final_info"]["shy"].tolist() == ["told", None]
        assert info["final_info"]["omitted"][1][0].leaf == "final_info['shy']"
        assert info["episode"]["l"].tolist() == [1, 1]


class Pressed(Exception):
    """What a signal handler of the user's raises."""


def _press(number: int, frame: object) -> None:
    raise Pressed


@pytest.fixture
def raising_usr1():
    before = signal.signal(signal.SIGUSR1, _press)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_what_a_signal_handler_raises_passes_and_the_info_can_be_read_after_it(pool_of, raising_usr1, number):
    with begun(pool_of(_two(None))) as pool:
        batch = pool.step([SHY, SHY])
        for _ in range(3):
            loads.append(lambda: signal.raise_signal(number))
            with pytest.raises((KeyboardInterrupt, Pressed)):
                batch.info.get("shy")
        assert batch.info["shy"].tolist() == ["read", "read"]
        assert "omitted" not in batch.info
        assert signal.getsignal(signal.SIGUSR1) is _press
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_ends_an_unpickling_that_is_interrupted_each_time(pool_of):
    with begun(pool_of(_two(None))) as pool:
        batch = pool.step([READABLE, SHY])
        loads.extend([lambda: signal.raise_signal(signal.SIGINT)] * 2)  # each look reads once
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                batch.info.get("shy")
        loads.clear()
        assert batch.info["shy"].tolist() == ["told", "read"]


def test_out_of_memory_is_no_fault_of_the_env(pool_of):
    with begun(pool_of(_two(None))) as pool:
        batch, loads[:] = pool.step([READABLE, SHY]), [partial(_raise, MemoryError())]
        with pytest.raises(MemoryError):
            batch.info.get("shy")
        assert batch.info["shy"].tolist() == ["told", "read"]


def test_another_thread_reads_infos_as_the_main_one_does(pool_of):
    with begun(pool_of(_two("SystemExit"))) as pool:
        batch = pool.step([READABLE, SHY])
        reader = threading.Thread(target=lambda: batch.info.get("shy"))
        reader.start()
        reader.join()
        assert batch.info["omitted"][1][0].leaf == "info['shy']"


# ---- observations with parts of no fixed size ----------------------------------------------------------------------------


class Anything(gymnasium.Space[Any]):
    """A space of one's own: its values travel in the payload."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def contains(self, x: Any) -> bool:
        return True

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return None


class ShyViewEnv(ShyEnv):
    """Action OPAQUE makes the observation unreadable."""

    def __init__(self, identity: int = 0, what: str | None = "SystemExit") -> None:
        super().__init__(identity, what)
        self.observation_space = gymnasium.spaces.Dict(
            count=gymnasium.spaces.Box(-1, 2**40, (3,), np.int64), view=Anything()
        )

    def reset(self, **arguments: Any) -> Any:
        obs, info = super().reset(**arguments)
        return {"count": obs, "view": "reset"}, info

    def step(self, action: np.int64) -> Any:
        obs, *rest = super().step(action)
        return {"count": obs, "view": Shy(self.what) if action == OPAQUE else "step"}, *rest


def _send_recv(pool: stepmill.Pool) -> None:
    pool.send([0, OPAQUE])
    pool.recv(2)


RECEIVE = {
    "step": lambda pool: pool.step([0, OPAQUE]),
    "step_fast": lambda pool: PoolPort(pool).step_fast([0, OPAQUE]),
    "step_obs": lambda pool: PoolPort(pool).step_obs([0, OPAQUE]),
    "recv": _send_recv,
}


@pytest.mark.parametrize("where", ["thread", "fork"])
@pytest.mark.parametrize("receive", RECEIVE)
@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt", "ValueError"])
def test_an_observation_that_cannot_be_read_is_a_fault_of_its_env(pool_of, error, receive):
    with begun(pool_of([lambda: ShyViewEnv(0, error)] * 2)) as pool:
        with pytest.raises(BadOutput, match=r"env 1 gave a wrong output of step: .*not here") as caught:
            RECEIVE[receive](pool)
        assert caught.value.env_id == 1
        batch = pool.recv()
        assert (batch.env_id.tolist(), batch.obs["view"]) == ([0], ("step",))
        pool.reset(env_ids=[1])
        assert pool.step([0, 0]).obs["view"] == ("step", "step")


def test_an_observation_that_cannot_be_read_is_truncated_under_that_policy(pool_of):
    with begun(pool_of([lambda: ShyViewEnv(0, "SystemExit")] * 2, on_fault="truncate")) as pool:
        batch = pool.step([0, OPAQUE])
        assert batch.truncated.tolist() == [False, True]
        assert batch.obs["view"] == ("step", "reset")  # the last good one
        assert "not here" in batch.info["fault"]["message"][1]


def test_a_value_whose_unpickling_fails_once_is_of_its_env(pool_of):
    with begun(pool_of([lambda: ShyViewEnv(0, None)] * 2)) as pool:
        batch = pool.step([0, SHY])
        loads.append(partial(_raise, OwnError("once")))
        assert batch.info["omitted"][1][0].leaf == "info['shy']"
        loads[:] = [partial(_raise, OwnError("once"))]
        with pytest.raises(BadOutput, match="env 1 gave a wrong output of step: once"):
            pool.step([0, OPAQUE])


def test_ctrl_c_while_an_observation_is_read_loses_nothing(pool_of):
    with begun(pool_of([lambda: ShyViewEnv(0, None)] * 2)) as pool:
        loads.append(lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            pool.step([0, OPAQUE])
        assert pool.recv().obs["view"] == ("step", "read")


def test_an_info_beside_an_observation_of_no_fixed_size_hides_nothing(pool_of):
    with begun(pool_of([lambda: ShyViewEnv(0, "SystemExit")] * 2)) as pool:
        batch = pool.step([0, SHY])
        assert batch.obs["view"] == ("step", "step")
        assert batch.info["t"].tolist() == [1, 1]
        assert batch.info["omitted"][1][0].leaf == "info['shy']"


# ---- what cannot be pickled ---------------------------------------------------------------------------------------------


class Held:
    """Something that cannot be pickled."""

    def __init__(self, place: str) -> None:
        self.place, self.lock = place, threading.Lock()


class HoldingEnv(CountingEnv):
    """Its infos hold objects that cannot be pickled."""

    def __init__(self, identity: int = 0) -> None:
        super().__init__(identity)
        self.made: list[weakref.ref[Held]] = []

    def step(self, action: np.int64) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if action:
            held = Held("here")
            self.made.append(weakref.ref(held))
            info |= {"held": held, "deep": {"list": [1, held]}}
        return obs, reward, terminated, truncated, info

    def num_alive(self) -> int:
        return sum(ref() is not None for ref in self.made)


@pytest.mark.parametrize("where", ["serial", "thread"])
def test_what_cannot_be_pickled_is_handed_over_as_it_is_where_nothing_need_travel(where):
    with begun(make_pool(where, [HoldingEnv] * 2)) as pool:
        batch = pool.step([0, 1])
        held = batch.info["held"][1]
        assert isinstance(held, Held)
        assert batch.info["deep"]["list"][1] == [1, held]
        assert rows_of(pool.step([0, 1]).info)[1][1]["held"] is not held
        assert pool.call("num_alive") == (0, 2)
        pool.step([0, 0])
        assert pool.call("num_alive") == (0, 1)  # the one that this test holds
        assert held.place == "here"


@pytest.mark.parametrize("where", ["serial", "thread"])
def test_a_pool_that_is_closed_lets_go_of_what_was_handed_over(where):
    env = HoldingEnv()
    with begun(make_pool(where, [lambda: env])) as pool:
        pool.step([1])
        assert env.num_alive() == 1
    gc.collect()
    assert env.num_alive() == 0


def test_an_info_that_cannot_be_pickled_names_env_and_key_where_it_must_travel():
    with begun(make_pool("fork", [HoldingEnv] * 2)) as pool:
        text = r"env 1 gave a wrong info of step: info\['held'\] cannot be pickled \(.*lock.*\); leave it out, or use"
        with pytest.raises(BadOutput, match=text) as caught:
            pool.step([0, 1])
        assert (caught.value.env_id, caught.value.leaf, caught.value.phase) == (1, "info['held']", "step")
        assert pool.recv().reward.tolist() == [0]


# ---- overwritten memory --------------------------------------------------------------------------------------------------


def _overwrite(pool: stepmill.Pool, env_id: int, bytes_: bytes) -> None:
    """Write over the payload of an env, the only one of its worker, as native code of that env may."""
    base, _ = pool._runtime.slab.native.place()
    plan: dict[str, Any] = dict(pool._runtime.slab.plan)
    ctypes.memmove(base + plan["segments"][PoolPort(pool).worker_of[env_id]] + plan["payload"][0], bytes_, len(bytes_))


@pytest.mark.parametrize("invalid", [b"\xff" * 16, b"N" * 16, b"d\x00" * 8, b"t\x00" * 8, b"o\x05" * 8, bytes(16)])
def test_an_info_that_was_written_over_names_its_env_and_hides_no_other(invalid):
    with begun(make_pool("fork", [ShyEnv] * 2)) as pool:
        pool.send([READABLE, READABLE])
        await_ready(pool, 2)
        _overwrite(pool, 1, invalid)
        batch = pool.recv()
        assert batch.info["t"].tolist()[0] == 1
        (error,) = batch.info["omitted"][1]
        assert isinstance(error, BadOutput)
        assert (error.env_id, error.leaf) == (1, "info")


def test_an_observation_that_was_written_over_is_a_fault_of_its_env():
    with begun(make_pool("fork", [lambda: ShyViewEnv(0, None)] * 2)) as pool:
        pool.send([0, 0])
        await_ready(pool, 2)
        _overwrite(pool, 1, b"\xff" * 16)
        with pytest.raises(BadOutput, match="env 1 gave a wrong output") as caught:
            pool.recv()
        assert caught.value.env_id == 1
        assert pool.recv().env_id.tolist() == [0]


@pytest.mark.parametrize("kind", [93847552, FaultKind.RAISED, FaultKind.BAD_OUTPUT, FaultKind.BAD_ACTION])
@pytest.mark.parametrize("record", [None, b"", b"\xff", b"d\x00", {"phase": "step"}])
def test_a_fault_whose_words_are_lost_is_an_error_that_names_the_env(kind, record):
    error = fault_error(EnvFailed(3, kind, record, 0, 1, False, False))
    assert isinstance(error, StepmillError)
    assert not isinstance(error, stepmill.EngineBug)
    assert "env 3" in str(error)
    assert error.env_id == 3


# ---- names that the pool uses itself --------------------------------------------------------------------------------------


class NamingEnv(CountingEnv):
    """Returns the info that it was made with."""

    def __init__(self, identity: int = 0, infos: dict[str, Any] | None = None, length: int = 5) -> None:
        super().__init__(identity, length)
        self.infos = infos or {}

    def reset(self, **arguments: Any) -> Any:
        return super().reset(**arguments)[0], dict(self.infos)

    def step(self, action: np.int64) -> Any:
        if action == 9:
            raise ValueError("nine")
        return (*super().step(action)[:4], dict(self.infos))


def test_a_fault_of_the_pools_is_reported_whatever_the_env_calls_a_fault(pool_of):
    with begun(pool_of([lambda: NamingEnv(0, {"fault": "motor", "a": 1})] * 2, on_fault="truncate")) as pool:
        batch = pool.step([0, 9])
        assert batch.info["_fault"].tolist() == [False, True]
        assert batch.info["fault"]["kind"].tolist() == [None, "raised"]
        assert batch.info["a"].tolist() == [1, 0]
        assert [error.leaf for error in batch.info["omitted"][0]] == ["info['fault']"]


def test_under_same_step_the_cause_of_a_truncation_is_in_the_last_info(pool_of):
    with begun(pool_of([NamingEnv] * 2, on_fault="truncate", autoreset_mode="SameStep")) as pool:
        batch = pool.step([0, 9])
        assert batch.truncated.tolist() == [False, True]
        assert batch.info["final_info"]["fault"]["kind"].tolist() == [None, "raised"]
        assert "fault" not in batch.info


def test_an_env_may_call_things_faults_where_the_pool_does_not(pool_of):
    with begun(pool_of([lambda: NamingEnv(0, {"fault": "motor", "final_info": 3})] * 2)) as pool:
        info = pool.step([0, 0]).info
        assert info["fault"].tolist() == ["motor", "motor"]
        assert info["final_info"].tolist() == [3, 3]
        assert "omitted" not in info


def test_under_same_step_last_observations_are_the_pools(pool_of):
    infos = {"final_obs": "mine", "final_info": {"a": 1}, "b": 2}
    with pool_of([lambda: NamingEnv(0, infos, 1), lambda: NamingEnv(1, infos, 2)], autoreset_mode="SameStep") as pool:
        pool.reset(seed=0)
        info = pool.step([0, 0]).info
        assert info["final_obs"][0].tolist() == [0, 0, 1]
        assert info["_final_obs"].tolist() == [True, False]
        assert info["final_info"]["b"].tolist() == [2, 0]
        assert info["_final_info"].tolist() == [True, False]
        assert info["b"].tolist() == [2, 2]
        assert {error.leaf for error in info["omitted"][1]} == {"info['final_obs']", "info['final_info']"}


@pytest.mark.parametrize(
    ("own", "r", "l"), [({"r": 50.0, "l": 7, "x": 1}, [50, 2], [7, 1]), ({"x": 1}, [0, 2], [0, 1])]
)
def test_an_episode_that_an_env_reports_itself_replaces_the_pools(pool_of, own, r, l):  # noqa: E741
    with begun(pool_of([lambda: NamingEnv(0, {"episode": own}, 1), lambda: NamingEnv(1, {}, 1)])) as pool:
        episode = pool.step([1, 2]).info["episode"]
        assert (episode["r"].tolist(), episode["l"].tolist()) == (r, l)
        assert episode["_r"].tolist() == ["r" in own, True]
        assert episode["x"].tolist() == [1, 0]


def test_an_env_may_number_its_episodes(pool_of):
    with begun(pool_of([lambda: NamingEnv(0, {"episode": 7}, 1), lambda: NamingEnv(1, {}, 1)])) as pool:
        info = pool.step([1, 2]).info
        assert (info["episode"].tolist(), info["_episode"].tolist()) == ([7, 0], [True, False])
