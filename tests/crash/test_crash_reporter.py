"""Crash capsules: what is in them, that they are bounded, and that none of it ever fails the run."""

from __future__ import annotations

import itertools
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.pool.capsule import Capsule, read_capsule
from stepmill.pool.crash_reporter import MAX_CAPSULES
from tests.harness import crashing
from tests.harness.crashing import CrashingEnv, steps
from tests.harness.hangs import DEADLINE_S
from tests.harness.kills import stop_process
from tests.harness.pools import begun, kill_worker, make_pool

POLICIES = ["raise", "truncate", "replay"]


def pool_in(folder: Path, where: str = "serial", num_envs: int = 3, **options: Any) -> stepmill.Pool:
    chosen = {"crash_dir": folder, "seeding": "per_episode", **options}
    return make_pool(where, [partial(CrashingEnv, 5)] * num_envs, **chosen)


def run(pool: stepmill.Pool, actions: list[int], env_id: int = 1) -> stepmill.Batch | None:
    for row in steps(actions, pool.num_envs, env_id):
        batch = pool.step(row)
    return batch


def the_capsule(folder: Path) -> Capsule:
    (path,) = folder.iterdir()
    return read_capsule(str(path), trust=True)


@pytest.mark.parametrize("where", ["serial", "thread", "fork"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_fault_leaves_one_capsule_with_the_episode_under_every_policy(where: str, policy: str, tmp_path: Path):
    with pool_in(tmp_path, where, on_fault=policy, restarts={"max_restarts": 2}) as pool:
        first = pool.reset(seed=7)
        if policy == "raise":
            with pytest.raises(stepmill.EnvError) as caught:
                run(pool, [2, 3, crashing.RAISE])
            told = str(caught.value), str(caught.value.capsule)
        else:  # an env that fails again when it is replayed has one capsule all the same
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # it cannot be played again
                batch = run(pool, [2, 3, crashing.RAISE])
            told = batch.info["fault"]["message"][1], batch.info["fault"]["capsule"][1]
    path = next(tmp_path.iterdir())
    capsule = read_capsule(str(path))
    assert all(str(path) in text for text in told)
    assert (capsule.kind, capsule.command, capsule.env_id, capsule.num_steps) == ("raised", "step", 1, 2)
    assert (capsule.seed, capsule.episode, capsule.is_whole) == (8, 0, True)
    assert capsule.error_type == "tests.harness.crashing.PlantedBug"
    assert "PlantedBug: after 2 steps" in capsule.traceback
    assert capsule.arrays["action.0"].tolist() == [2, 3, crashing.RAISE]
    assert capsule.arrays["rewards"].tolist() == [0.0, 2.0, 3.0]
    assert capsule.arrays["flags"].tolist() == [0, 0, 0]
    assert len(set(capsule.arrays["hashes"].tolist())) == 3
    assert first.obs.shape == (3, 2)


def test_a_capsule_says_which_env_ran_where_and_with_what(tmp_path: Path):
    with pool_in(tmp_path, "fork", step_timeout_s=20.0, num_workers=3) as pool:
        pool.set_attr("offset", [0.0, 0.5, 0.0])
        pool.reset(seed=[1, 2**64 - 1, 3], options={"start": 4})
        with pytest.raises(stepmill.EnvError):
            run(pool, [crashing.RAISE])
    capsule = the_capsule(tmp_path)
    assert capsule.seed == 2**64 - 1
    assert capsule.load("options") == {"start": 4}
    assert capsule.load("attribute offset") == 0.5
    env_fn = capsule.load("env_fn")
    assert (env_fn.func, env_fn.args, env_fn.keywords) == (CrashingEnv, (5,), {})
    assert capsule.pickled == {"env_fn": "functools.partial(<class 'tests.harness.crashing.CrashingEnv'>, 5)"}
    assert capsule.pool["step_timeout_s"] == 20.0
    assert (capsule.worker, capsule.worker_env_ids) == (1, [1])
    assert capsule.versions.keys() == {"python", "stepmill", "numpy", "gymnasium", "os"}
    assert capsule.notes == []


@pytest.mark.parametrize(
    ("where", "action", "end"),
    [
        ("fork", crashing.SEGFAULT, "SIGSEGV"),
        ("fork", crashing.ABORT, "SIGABRT"),
        ("fork", crashing.EXIT, 17),
        ("forkserver", crashing.ABORT, "SIGABRT"),
        ("spawn", crashing.SEGFAULT, "SIGSEGV"),
    ],
)
def test_a_crash_leaves_exit_status_and_the_stack_of_the_worker(where: str, action: int, end: Any, tmp_path: Path):
    with begun(pool_in(tmp_path, where, on_fault="truncate", num_workers=2)) as pool:
        batch = run(pool, [1, action])
        assert batch.info["fault"]["kind"][1] == "died"
    capsule = the_capsule(tmp_path)  # one, though another env may have died with it
    assert (capsule.kind, capsule.env_id) == ("died", 1)
    assert end in (capsule.signal_name, capsule.exit_code)
    assert ("crashing.py" in capsule.trace) is (action != crashing.EXIT)


@pytest.mark.parametrize("action", [crashing.HANG, crashing.HANG_C])
def test_a_hang_leaves_the_stack_of_the_worker(action: int, tmp_path: Path):
    with begun(pool_in(tmp_path, "fork", on_fault="truncate", step_timeout_s=DEADLINE_S)) as pool:
        batch = run(pool, [1, action])
        assert batch.info["fault"]["kind"][1] == "timed_out"
    capsule = the_capsule(tmp_path)
    assert (capsule.kind, capsule.num_steps) == ("timed_out", 1)
    assert "crashing.py" in capsule.trace


def test_a_worker_that_is_stopped_leaves_no_stack_and_is_ended_all_the_same(tmp_path: Path):
    with begun(pool_in(tmp_path, "fork", on_fault="truncate", step_timeout_s=DEADLINE_S)) as pool:
        stop_process(pool.stats().workers[1].pid)
        run(pool, [1])
        run(pool, [1])
    assert the_capsule(tmp_path).notes == ["the worker left no traceback"]


def test_a_worker_killed_while_idle_leaves_a_capsule(tmp_path: Path):
    with begun(pool_in(tmp_path, "fork", num_workers=1)) as pool:
        run(pool, [1])
        kill_worker(pool)
        with pytest.raises(stepmill.WorkerDied, match="crash capsule: /"):
            run(pool, [1])
    capsule = the_capsule(tmp_path)
    assert (capsule.signal_name, capsule.command, capsule.num_steps) == ("SIGKILL", "", 1)
    assert "any of them may be the cause" in capsule.notes[-1]


@pytest.mark.parametrize("where", ["serial", "thread", "fork"])
def test_a_constructor_that_raises_leaves_a_capsule(where: str, tmp_path: Path):
    fns = [CrashingEnv, partial(CrashingEnv, is_broken=True)]
    with pytest.raises(stepmill.EnvError, match="crash capsule: /"):
        make_pool(where, fns, crash_dir=tmp_path)
    capsule = the_capsule(tmp_path)
    assert (capsule.command, capsule.env_id, capsule.phase) == ("construct", 1, "construct")


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_reset_that_raises_has_the_episode_before_it(mode: str, tmp_path: Path):
    with pool_in(tmp_path, autoreset_mode=mode) as pool:
        pool.reset(seed=3)
        with pytest.raises(stepmill.EnvError, match="in a reset"):
            _until_a_reset(pool, mode)
    capsule = the_capsule(tmp_path)
    command, num_steps = {"NextStep": ("reset", 2), "SameStep": ("step", 1), "Disabled": ("reset", 0)}[mode]
    assert (capsule.command, capsule.num_steps) == (command, num_steps)
    assert capsule.command_seed is not None


def _until_a_reset(pool: stepmill.Pool, mode: str) -> None:
    run(pool, [2, crashing.DIE_IN_RESET])
    if mode == "Disabled":
        pool.reset()
    else:
        run(pool, [1])


class Unpicklable:
    """Raises what `pickle` does not expect, as objects of users may."""

    def __reduce__(self) -> Any:
        raise LookupError("not this one")


def test_what_cannot_be_stored_is_noted_and_fails_nothing(tmp_path: Path):
    helper = Unpicklable()

    def make() -> CrashingEnv:
        return CrashingEnv(5 if helper else 0)

    with make_pool("serial", [make], crash_dir=tmp_path) as pool:
        pool.set_attr("offset", [np.float64(0.5)])
        pool.set_attr("helper", [helper])
        pool.set_attr("table", [np.zeros(40_000)])
        pool.reset(seed=1, options={"start": 0.0, "table": np.zeros(40_000)})
        for row in steps([2, crashing.RAISE], 1, 0)[1:]:
            with pytest.raises(stepmill.EnvError):
                pool.step(row)
    capsule = the_capsule(tmp_path)
    notes = "\n".join(capsule.notes)
    assert "the env_fn cannot be stored: not this one" in notes
    assert "its log became too long" not in notes
    assert "the options cannot be stored: it would take" in notes
    assert "the attribute helper cannot be stored: not this one" in notes
    assert "the attribute table cannot be stored: it would take" in notes
    assert list(capsule.parts) == ["command_options", "attribute offset"]


class EndlessEnv(CrashingEnv):
    """Its pickle does not end."""

    def __reduce__(self) -> Any:
        return list, (), None, itertools.repeat(b"x")


def test_a_large_object_is_not_pickled_to_its_end(tmp_path: Path):
    env = EndlessEnv(5)
    with make_pool("serial", [lambda: env], crash_dir=tmp_path) as pool:
        pool.reset(seed=1)
        with pytest.raises(stepmill.EnvError):
            pool.step([crashing.RAISE])
    (note,) = the_capsule(tmp_path).notes
    assert note.startswith("the env_fn cannot be stored: it would take 26")
    assert note.endswith("bytes or more, and the limit is 262144")


def test_an_env_fn_that_no_other_program_can_import_is_stored_by_value(tmp_path: Path):
    class Local(CrashingEnv):
        pass

    with make_pool("serial", [lambda: Local(5)], crash_dir=tmp_path) as pool:
        pool.reset(seed=1)
        with pytest.raises(stepmill.EnvError):
            pool.step([crashing.RAISE])
    assert type(the_capsule(tmp_path).load("env_fn")()).__name__ == "Local"


def _put(name: str, env: Any, value: float) -> None:
    setattr(env.unwrapped, name, value)


class Putter:
    def __call__(self, env: Any, value: float) -> None:
        env.unwrapped.bonus = value


def test_what_sets_something_without_a_name_of_its_own_keeps_no_capsule_from_being_written(tmp_path: Path):
    with pool_in(tmp_path) as pool:
        pool.set_attr(partial(_put, "bonus"), 1.0)
        pool.set_attr(Putter(), 2.0)
        pool.reset(seed=0)
        with pytest.raises(stepmill.EnvError):
            run(pool, [1, crashing.RAISE])
    notes = "\n".join(the_capsule(tmp_path).notes)
    assert "with the function _put is not in the capsule" in notes
    assert "with the function Putter is not in the capsule" in notes


def test_a_log_that_is_too_long_is_left_out_and_noted(tmp_path: Path):
    with begun(pool_in(tmp_path, restarts={"replay_log_bytes": 100})) as pool, pytest.raises(stepmill.EnvError):
        run(pool, [1, 1, 1, crashing.RAISE])
    capsule = the_capsule(tmp_path)
    assert not capsule.is_whole
    assert capsule.arrays["action.0"].tolist() == [crashing.RAISE]
    assert "replay_log_bytes" in capsule.notes[0]


def test_a_seed_that_goes_on_is_noted(tmp_path: Path):
    with pool_in(tmp_path, seeding="continue") as pool:
        pool.reset()
        with pytest.raises(stepmill.EnvError):
            run(pool, [1] * 6 + [crashing.RAISE])
    capsule = the_capsule(tmp_path)
    assert (capsule.episode, capsule.seed) == (1, None)
    assert any("per_episode" in note for note in capsule.notes)


def test_the_first_episode_of_a_pool_with_capsules_always_has_a_seed(tmp_path: Path):
    with pool_in(tmp_path, seeding="continue") as pool:
        pool.reset()
        with pytest.raises(stepmill.EnvError):
            run(pool, [crashing.RAISE])
    assert isinstance(the_capsule(tmp_path).seed, int)


def test_a_folder_that_vanishes_is_made_again_or_noted_in_the_error_and_the_run_goes_on(tmp_path: Path):
    folder = tmp_path / "new" / "crashes"
    with begun(pool_in(folder, on_fault="truncate")) as pool:
        folder.rmdir()
        batch = run(pool, [crashing.RAISE])
        assert Path(batch.info["fault"]["capsule"][1]).parent == folder
        shutil.rmtree(folder)
        folder.write_text("somebody else's")
        batch = run(pool, [1, crashing.RAISE])
        assert "no crash capsule could be written: FileExistsError" in batch.info["fault"]["message"][1]
        assert "capsule" not in batch.info["fault"]
        run(pool, [1, 1])


def test_a_capsule_has_the_options_of_its_episode_whether_or_not_a_seed_came_with_them(tmp_path: Path):
    with pool_in(tmp_path) as pool:
        pool.reset(seed=3)
        options = {"start": 4}
        pool.reset(options=options)
        options["start"] = 5
        with pytest.raises(stepmill.EnvError):
            run(pool, [1, crashing.RAISE])
    capsule = the_capsule(tmp_path)
    assert (capsule.load("options"), capsule.episode, capsule.is_whole) == ({"start": 4}, 1, True)


def test_a_capsule_has_the_stored_options_of_an_episode_that_began_without_options(tmp_path: Path):
    with pool_in(tmp_path, on_fault="truncate") as pool:
        pool.reset(seed=0, options={"start": 4}, persist_options=True)
        run(pool, [1] * 6 + [crashing.RAISE])  # after an automatic reset
    capsule = the_capsule(tmp_path)
    assert (capsule.episode, capsule.load("options"), capsule.notes) == (1, {"start": 4}, [])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_capsule_has_the_stored_options_of_the_reset_that_failed(mode: str, tmp_path: Path):
    with pool_in(tmp_path, autoreset_mode=mode) as pool:
        pool.reset(seed=0, options={"start": 4}, persist_options=True)
        pool.reset(options={"start": 5})
        with pytest.raises(stepmill.EnvError, match="in a reset"):
            _until_a_reset(pool, mode)
    capsule = the_capsule(tmp_path)
    began_with = None if mode == "Disabled" else {"start": 5}  # the episode is over
    assert (capsule.load("options"), capsule.load("command_options")) == (began_with, {"start": 4})


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(stepmill.UsageError, match="crash_dir"):
        pool_in(tmp_path / "file" / "crashes")
    with pytest.raises(stepmill.UsageError, match="crash_dir"):
        stepmill.PoolOptions(crash_dir=7)  # type: ignore[arg-type]


def test_an_env_that_fails_for_ever_does_not_fill_the_disk(tmp_path: Path):
    with pool_in(tmp_path, num_envs=1) as pool:
        for seed in range(MAX_CAPSULES + 3):
            pool.reset(seed=seed)
            with pytest.raises(stepmill.EnvError, match="capsule") as caught:
                pool.step([crashing.RAISE])
    assert f"{MAX_CAPSULES} were written" in caught.value.message
    assert len(list(tmp_path.iterdir())) == MAX_CAPSULES


def test_no_run_without_a_folder_writes_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with begun(make_pool("serial", [CrashingEnv])) as pool, pytest.raises(stepmill.EnvError) as caught:
        pool.step([crashing.RAISE])
    assert caught.value.capsule is None
    assert list(tmp_path.iterdir()) == []
