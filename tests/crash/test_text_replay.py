"""Actions without a fixed size are logged: killed workers change no value of such episodes, and their capsules can be replayed."""

from __future__ import annotations

import json
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stepmill
from stepmill.pool.capsule import read_capsule
from stepmill.testing.gates import Gate, wait_at
from stepmill.testing.sampled import describe
from tests.harness.commands import run_command
from tests.harness.hangs import DEADLINE_S
from tests.harness.kills import kill_process
from tests.harness.pools import begun, kill_worker, make_pool
from tests.harness.text_envs import MutteringEnv, TalkEnv, batched, draw_action

RESTARTS = {"max_restarts": 1000, "restart_window_s": 0.02}
NUM_ENVS = 4


def make(env_fn: Any = TalkEnv, where: str = "fork", num_envs: int = NUM_ENVS, **options: Any) -> stepmill.Pool:
    restarts = {**RESTARTS, **options.pop("restarts", {})}
    chosen = {"on_fault": "replay", "seeding": "per_episode", "restarts": restarts, **options}
    return make_pool(where, [env_fn] * num_envs, **chosen)


def facts(batch: stepmill.Batch) -> str:
    """Return every value of a batch as text, sorted by env."""
    rows = zip(
        batch.env_id.tolist(), batch.obs["heard"], batch.obs["clock"], batch.reward, batch.terminated, strict=True
    )
    memories = {key: batch.info.get(key) for key in ("memory", "topic", "final_info", "final_obs", "episode", "fault")}
    return describe([sorted(rows, key=lambda row: row[0]), batch.truncated, memories])


def reset_ended(pool: stepmill.Pool, batch: stepmill.Batch) -> None:
    ended = batch.env_id[batch.terminated | batch.truncated].tolist()
    if ended and pool.options.autoreset_mode is stepmill.AutoresetMode.DISABLED:
        pool.reset(env_ids=ended)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("kind", ["text", "sequence", "graph", "tree"])
def test_killed_workers_change_no_value_of_episodes_with_such_actions(kind: str, mode: str) -> None:
    rng = random.Random(f"{kind}{mode}")
    env_fn = partial(TalkEnv, kind)
    with (
        make(env_fn, autoreset_mode=mode) as pool,
        make(env_fn, "serial", on_fault="raise", autoreset_mode=mode) as calm,
    ):
        options = {"topic": "weather " * 100}
        for each in (pool, calm):
            each.reset(seed=3, options=options)
        for step in range(60):
            actions = batched(kind, [draw_action(kind, rng) for _ in range(NUM_ENVS)])
            if step % 7 == 4:
                kill_process(pool.stats().workers[rng.randrange(2)].pid)
            ours, theirs = pool.step(actions), calm.step(actions)
            assert facts(ours) == facts(theirs), step
            reset_ended(pool, ours), reset_ended(calm, theirs)
        assert pool._recovery.workers.num_restarts > 5


def test_steps_that_are_sent_while_their_env_is_replayed_get_their_own_actions() -> None:
    rng = random.Random(11)
    with make() as pool, make(where="serial", on_fault="raise") as calm:
        pool.reset(seed=1), calm.reset(seed=1)
        for step in range(80):
            chosen = sorted(rng.sample(range(NUM_ENVS), rng.randint(1, NUM_ENVS)))
            actions = [draw_action("text", rng) for _ in chosen]
            worker = rng.randrange(2)
            is_alive = not pool.stats().workers[worker].is_dead
            if step % 5 == 3 and is_alive:
                kill_worker(pool, worker)  # the pool knows before the steps are sent
            for each in (pool, calm):
                each.send(actions, chosen)
            if step % 5 == 1 and is_alive:
                kill_process(pool.stats().workers[worker].pid)  # while the steps are under way
            assert facts(pool.recv(len(chosen))) == facts(calm.recv(len(chosen))), step


@pytest.mark.parametrize("where", ["serial", "thread", "fork"])
def test_an_env_that_raises_between_such_actions_is_rebuilt_and_replayed(where: str, tmp_path: Path) -> None:
    with make(partial(MoodyTalkEnv, str(tmp_path)), where, 2) as pool, make(where="serial", num_envs=2) as calm:
        pool.reset(seed=1), calm.reset(seed=1)
        for step, action in enumerate(["a", "b" * 1000, "c", "d"]):
            if step == 2:
                (tmp_path / "now").touch()
            assert facts(pool.step([action, "x"])) == facts(calm.step([action, "x"])), step
        assert not (tmp_path / "now").exists()


class MoodyTalkEnv(TalkEnv):
    """Raises once when the file exists."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._mark = Path(folder, "now")

    def step(self, action: Any) -> Any:
        if action == "c" and self._mark.exists():
            self._mark.unlink()
            raise LookupError("not this time")
        return super().step(action)


def test_a_text_that_differs_in_the_replay_is_found() -> None:
    with begun(make(partial(MutteringEnv, length=100))) as pool:
        pool.step(["a"] * NUM_ENVS)
        kill_worker(pool)
        with pytest.warns(RuntimeWarning, match="not replayable: step 0 gave another result"):
            assert pool.step(["b"] * NUM_ENVS).truncated.tolist() == [True, True, False, False]


def test_the_log_of_such_actions_is_bounded_and_says_so() -> None:
    limit = 20_000
    with begun(make(partial(TalkEnv, length=100), restarts={"replay_log_bytes": limit})) as pool:
        for _ in range(8):
            pool.step(["x" * 3000, "y", "z", "w"])
            assert 0 < pool.stats().replay_log_bytes <= limit
        kill_worker(pool)
        batch = pool.step(["a"] * NUM_ENVS)
    assert batch.truncated.tolist() == [True, False, False, False]
    assert f"it grew over restarts.replay_log_bytes={limit}" in batch.info["fault"]["not_replayable"][0]


def test_one_action_that_is_larger_than_the_log_costs_only_the_replay_of_its_own_episode() -> None:
    with begun(make(partial(TalkEnv, length=3), restarts={"replay_log_bytes": 10_000})) as pool:
        pool.step(["x" * 50_000, "y", "y", "y"])
        kill_worker(pool)
        assert pool.step(["a"] * NUM_ENVS).truncated.tolist() == [True, False, False, False]
        pool.step(["a"] * NUM_ENVS)
        kill_worker(pool)
        assert pool.step(["a"] * NUM_ENVS).truncated.tolist() == [False] * NUM_ENVS


class GatedTalkEnv(TalkEnv):
    """Waits at a gate in a step with the action "gate"."""

    def __init__(self, gate: Path) -> None:
        super().__init__(length=100)
        self._gate = gate

    def step(self, action: Any) -> Any:
        if action == "gate":
            wait_at(self._gate)
        return super().step(action)


def has_arrived(gate: Gate) -> bool:
    try:
        gate.wait_arrivals(timeout_s=0)
    except TimeoutError:
        return False
    return True


def test_a_log_that_is_dropped_during_its_replay_cuts_the_episode_short() -> None:
    with (
        Gate() as gate,
        begun(make(partial(GatedTalkEnv, gate.path), num_envs=2, restarts={"replay_log_bytes": 40_000})) as pool,
    ):
        gate.open()
        for action in ("x" * 8000, "gate", "y" * 8000, "z" * 8000):
            pool.step([action, "short"])
        gate.wait_arrivals()
        kill_worker(pool)
        pool.send(["again"], [0])
        while not has_arrived(gate):
            pool.send(["short"], [1])
            assert pool.recv(1).env_id.tolist() == [1]
        pool.send(["y" * 9000], [1])
        pool.recv(1)
        gate.open()
        batch = pool.recv(1)
    assert (batch.env_id.tolist(), batch.truncated.tolist()) == ([0], [True])
    assert "replay_log_bytes" in batch.info["fault"]["not_replayable"][0]


def test_an_action_that_cannot_be_pickled_is_refused_by_name_and_changes_nothing() -> None:
    with make(where="fork") as pool, make(where="serial") as calm:
        pool.reset(seed=0), calm.reset(seed=0)
        with pytest.raises(stepmill.UsageError, match=r"the action of env 2 cannot be sent: .*lock"):
            pool.step(["a", "b", threading.Lock(), "d"])
        assert facts(pool.step(["a", "b", "c", "d"])) == facts(calm.step(["a", "b", "c", "d"]))


# ---- capsules ----------------------------------------------------------------------------------------------------


def crash(folder: Path, kind: str, actions: list[Any], where: str = "fork", **options: Any) -> str:
    """Make env 1 of a pool fail at the last of the actions; return its capsule."""
    with make(partial(TalkEnv, kind, 100), where, 2, on_fault="raise", crash_dir=folder, **options) as pool:
        pool.reset(seed=5, options={"topic": "crash"})
        with pytest.raises(stepmill.StepmillError):
            _drive(pool, kind, actions)
    return str(next(folder.glob("*.capsule")))


def _drive(pool: stepmill.Pool, kind: str, actions: list[Any]) -> None:
    for action in actions:
        pool.step(batched(kind, [draw_action(kind, random.Random(1)), action]))


@pytest.mark.parametrize(("deed", "kind"), [("raise", "raised"), ("segfault", "died"), ("hang", "timed_out")])
def test_a_capsule_has_the_texts_and_fails_again_in_the_same_way(deed: str, kind: str, tmp_path: Path) -> None:
    texts = ["hello", "env:says ♥\n" * 300, "", deed]
    path = crash(tmp_path, "text", texts, step_timeout_s=DEADLINE_S)
    capsule = read_capsule(path)
    assert (capsule.kind, capsule.is_whole, capsule.notes, capsule.num_actions) == (kind, True, [], 4)
    assert capsule.load("actions") == [[text] for text in texts]
    done = run_command("replay", path, "--trust", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]) == (0, "reproduced"), done.stderr
    assert (report["steps"], report["divergence"], report["failure"]["step"]) == (3, None, 4)


@pytest.mark.parametrize("kind", ["sequence", "graph", "tree"])
def test_capsules_have_actions_of_every_kind(kind: str, tmp_path: Path) -> None:
    rng = random.Random(kind)
    actions = [draw_action(kind, rng) for _ in range(4)]
    with make(partial(TalkEnv, kind, 100), "fork", 2, on_fault="raise", crash_dir=tmp_path) as pool:
        pool.reset(seed=5)
        _drive(pool, kind, actions)
        kill_worker(pool, 1)
        with pytest.raises(stepmill.WorkerDied):
            _drive(pool, kind, actions[:1])
    path = str(next(tmp_path.glob("*.capsule")))
    assert read_capsule(path).is_whole
    report = json.loads(run_command("replay", path, "--trust", "--json").stdout)
    assert (report["steps"], report["divergence"]) == (4, None)


def test_a_capsule_has_actions_that_the_codec_pickles(tmp_path: Path) -> None:
    with make(partial(TalkEnv, "text", 100), "serial", 1, on_fault="raise", crash_dir=tmp_path) as pool:
        pool.reset(seed=5)
        pool.step([{1, 2}])
        with pytest.raises(stepmill.EnvError):
            pool.step(["raise"])
    capsule = read_capsule(str(next(tmp_path.iterdir())), trust=True)
    assert capsule.pickled["actions"] == "[[{1, 2}], ['raise']]"
    assert (capsule.is_whole, capsule.load("actions")) == (True, [[{1, 2}], ["raise"]])


def test_a_capsule_without_the_actions_says_why(tmp_path: Path) -> None:
    with make(partial(TalkEnv, "text", 100), "serial", 1, on_fault="raise", crash_dir=tmp_path) as pool:
        pool.reset(seed=5)
        pool.step(["x" * (17 << 20)])
        with pytest.raises(stepmill.EnvError):
            pool.step(["raise"])
    capsule = read_capsule(str(next(tmp_path.iterdir())))
    assert (capsule.is_whole, capsule.num_actions, capsule.load("actions")) == (False, 0, None)
    assert capsule.notes[0].startswith("the actions cannot be stored: it would take 17825")
