"""Policies, envs and arguments that are wrong or odd."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

import stepmill
from tests.evaluation.envs import Walk, forward
from tests.evaluation.test_evaluate import played_by_hand

play = partial(stepmill.evaluate, num_envs=4, backend="serial", progress=False)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda obs: np.zeros(32, int),
        lambda obs: 1,
        lambda obs: None,
        lambda obs: {"a": 1},
        lambda obs: np.zeros((len(obs), 7)),
    ],
)
def test_a_policy_must_return_an_action_for_each_row(wrong):
    with pytest.raises(
        stepmill.UsageError, match=r"the policy must return actions for \d rows of Discrete|^actions have shape"
    ):
        play(wrong, Walk, seeds=range(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": 5}, "such as range"),
        ({"seeds": [1.5]}, "whole numbers"),
        ({"seeds": [-1]}, "0 or more"),
        ({"env": Walk()}, "env is a Walk; give a Gymnasium id"),
        ({"infos": "at"}, "a list of names"),
        ({"retries": -1}, "retries=-1"),
        ({"record": "failures"}, "give videos="),
        ({"seeds": [1, 1]}, r"seeds \[1\] are given twice"),
        ({"seeds": []}, "at least one"),
        ({"tasks": {}}, "`tasks` is empty"),
        ({"tasks": [3]}, "give a mapping of reset options"),
        ({"env": None}, "nothing to evaluate"),
        ({"env": None, "tasks": [{"limit": 3}]}, "has no env"),
        ({"policy": 3}, "the policy is a int"),
        ({"policy": lambda a, b: a}, r"called as \(a, b\)"),
        ({"record": "some"}, "record='some'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"autoreset_mode": "NextStep"}, "leave autoreset_mode out"),
        ({"on_fault": "truncate"}, "would end episodes early"),
        ({"restarts": {"on_raise": "truncate"}}, "would end episodes early"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(stepmill.UsageError, match=message):
        play(**{"policy": forward, "env": Walk, "seeds": range(2), **arguments})


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_infos_of_different_shapes_and_types_are_kept(backend):
    class Contacts(Walk):
        def step(self, action):
            *result, info = super().step(action)
            contacts = np.zeros((1 + self.num_steps % 3, 2)) if self.goal > 6 else None
            return (*result, {**info, "contacts": contacts})

    found = play(forward, Contacts, seeds=range(20), num_envs=16, num_workers=2, backend=backend, infos=["contacts"])
    for each in found.episodes:
        shape = (1 + each.length % 3, 2)
        assert each.infos["contacts"] is None or each.infos["contacts"].shape == shape


def test_infos_of_kernels_are_found():
    kernel = stepmill.kernels.find("Taxi-v4")
    found = play(
        lambda obs: np.zeros(len(obs), int), kernel, seeds=range(2), backend="kernel", infos=["prob"], success="prob"
    )
    assert [(each.infos["prob"], each.success) for each in found.episodes] == [(1.0, True)] * 2


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_resets_get_options_of_their_own_or_none(backend):
    class Picky(Walk):
        def reset(self, *, seed=None, options=None):
            further = 0 if options is None else options.pop("further")
            return super().reset(seed=seed, options={"further": further})

    options = {"further": 2}
    play(forward, Picky, seeds=range(3), backend=backend)
    found = play(forward, Picky, tasks=[options], seeds=range(6), backend=backend)
    assert [each.length for each in found.episodes] == [played_by_hand(seed, options=options)[3] for seed in range(6)]


def test_tasks_with_equal_names_are_numbered():
    found = play(forward, Walk, tasks={1: {}, "1": {"further": 3}}, seeds=[0])
    assert [each.task for each in found.episodes] == ["1 #0", "1 #1"]
    again = play(forward, Walk, tasks=[{"further": 3}, {"further": 3}], seeds=[0])
    assert list(again.by_task) == ["further=3 #0", "further=3 #1"]
    # The name of the third task is what the second one would get.
    several = play(forward, Walk, tasks={1: {}, "1": {"further": 3}, "1 #1": {}}, seeds=[0])
    assert list(several.by_task) == ["1 #0", "1 #1 #1", "1 #1 #2"]


def test_videos_of_tasks_with_like_names_have_files_of_their_own(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    make = partial(Walk, render_mode="rgb_array")
    play(forward, make, tasks={"a/b": {}, "a b": {}, "x" * 300: {}}, seeds=[0], videos=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a_b_0-0.mp4", "a_b_1-0.mp4", f"{'x' * 100}-0.mp4"}


def test_videos_of_tasks_with_names_of_a_hundred_letters_of_any_alphabet_are_written(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    make = partial(Walk, render_mode="rgb_array")
    play(forward, make, tasks={"道" * 100: {}, "道" * 101: {}}, seeds=[2**64], videos=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{'道' * 33}_{place}-{2**64}.mp4" for place in (0, 1)}


def test_a_link_beside_a_video_is_not_written_through(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    make = partial(Walk, render_mode="rgb_array")
    victim, folder = tmp_path / "victim", tmp_path / "videos"
    victim.write_text("precious")
    folder.mkdir()
    for name in (".0.mp4", "0.mp4"):
        (folder / name).symlink_to(victim)
    play(forward, make, seeds=[0], videos=folder)
    assert victim.read_text() == "precious"
    assert not (folder / "0.mp4").is_symlink()
    assert {path.name for path in folder.iterdir()} == {"0.mp4", ".0.mp4"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (float("nan"), None),
        (np.float32("nan"), None),
        ([False], False),
        (np.array([True]), True),
        (np.array(0.0), False),
        (1, True),
    ],
)
@pytest.mark.parametrize(
    "success", [None, "success", lambda info: info["success"]], ids=["default", "name", "function"]
)
def test_a_success_is_a_truth_value_or_unknown(value, expected, success):
    found = play(forward, partial(Judged, value), seeds=range(2), success=success)
    assert [each.success for each in found.episodes] == [expected] * 2
    assert found.summary.success_rate == (None if expected is None else float(expected))


@pytest.mark.parametrize("value", [np.array([True, False]), "False", [], {"left": True}, [[1], [2, 3]]])
@pytest.mark.parametrize("success", ["success", lambda info: info["success"]], ids=["name", "function"])
def test_a_success_that_is_no_truth_value_is_refused(value, success):
    with pytest.raises(stepmill.UsageError, match=r"is .*, and not true, false or None; give success="):
        play(forward, partial(Judged, value), seeds=range(2), success=success)


class Judged(Walk):
    """Ends with any value as its success."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def step(self, action):
        *result, _ = super().step(action)
        return (*result, {"success": self.value})


def test_json_has_null_for_numbers_that_json_does_not_have():
    class Strange(Walk):
        def step(self, action):
            obs, _, *rest, _ = super().step(action)
            odd = {"odd": np.array([np.inf, 1], np.float32), "by_number": {np.nan: -np.inf}}
            return (obs, float("nan"), *rest, odd)

    def refuse(name):
        raise AssertionError(name)

    found = play(forward, Strange, seeds=range(2), infos=["odd", "by_number"])
    document = json.loads(found.to_json(), parse_constant=refuse)
    assert document["summary"]["mean_return"] is None
    assert document["episodes"][0]["infos"] == {"odd": [None, 1.0], "by_number": {"nan": None}}


def test_a_return_that_is_not_a_number_is_shown():
    class Strange(Walk):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return (obs, float("nan"), *rest)

    found = play(forward, Strange, tasks={"go [left]": {}}, seeds=range(3))
    assert np.isnan(found.summary.mean_return)
    assert "nan" in str(found)
    assert "go [left]" in str(found)  # the name is not markup


TO_PANDAS = """
import stepmill
from tests.evaluation.envs import Walk, forward

options = {"infos": ["at", "seed"], "success": "is_success", "backend": "serial"}
frame = stepmill.evaluate(forward, Walk, seeds=range(3), **options).to_pandas()
assert {"seed", "success", "at"} <= {*frame.columns}, frame.columns
assert frame.seed.tolist() == [0, 1, 2]
"""


@pytest.mark.skipif(find_spec("pandas") is None, reason="needs pandas")
def test_rows_become_a_data_frame():
    # In a process of its own: pandas starts threads that stay.
    subprocess.run([sys.executable, "-c", TO_PANDAS], check=True, timeout=120)


class Model:
    """Has the form of SB3's models, which are no functions."""

    def predict(self, obs, state=None, episode_start=None, deterministic=False):
        return forward(obs), state


model = Model()


def test_the_command_takes_a_model():
    from click.testing import CliRunner

    from stepmill.cli.evaluate_command import evaluate

    arguments = ["tests.evaluation.envs:Walk", "--policy", "tests.evaluation.test_misuse:model", "--seeds", "2"]
    done = CliRunner().invoke(evaluate, [*arguments, "--backend", "serial", "--json"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.output)["episodes"]) == 2


def test_a_success_that_no_info_has_ends_the_call_though_workers_look_for_it(tmp_path):
    make = partial(Walk, render_mode="rgb_array")
    recorded = {"videos": tmp_path, "record": "failures", "success": "won"}
    with pytest.raises(stepmill.UsageError, match="success='won', but the info at the end of an episode has"):
        play(forward, make, seeds=range(100), num_workers=2, backend="process", **recorded)


def test_a_table_tells_some_faults_and_how_many_more_there_are():
    class Broken(Walk):
        def step(self, action):
            raise ValueError("no gravity")

    text = str(play(forward, Broken, seeds=range(5), retries=0))
    assert text.count("no gravity") == 3
    assert "seed 0: env 0 raised ValueError" in text
    assert "and 2 more" in text
