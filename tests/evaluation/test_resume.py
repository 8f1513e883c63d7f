"""The file of `resume=`: it is whole after whatever happened, and episodes of another evaluation are not mixed in."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

import stepmill
from tests.evaluation.envs import Walk, forward
from tests.evaluation.test_evaluate import facts

play = partial(stepmill.evaluate, num_envs=4, backend="serial", progress=False)


def other(obs):
    return forward(obs)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"env": partial(Walk, speed=2)}, "env"),
        ({"policy": other}, "policy"),
        ({"tasks": {"far": {"further": 9}}}, "tasks"),
        ({"success": "at"}, "success"),
        ({"infos": ["at"]}, "infos"),
    ],
)
def test_the_file_of_another_evaluation_is_refused_and_not_changed(tmp_path, changes, name):
    path = tmp_path / "eval.jsonl"
    given = {"policy": forward, "env": partial(Walk, speed=1), "seeds": range(3)}
    play(**given, resume=path)
    before = path.read_bytes()
    with pytest.raises(stepmill.UsageError, match=f"not for this evaluation: its {name} is .*; name another file"):
        play(**{**given, **changes}, resume=path)
    assert path.read_bytes() == before
    assert len(play(**{**given, "seeds": range(5)}, resume=path).episodes) == 5  # other seeds may be added


@pytest.mark.parametrize("content", [b"something", b"\xff\xfe\x00", b"[1]\n", b'{"a": 1}', b"3\n", b"{", b'{"'])
def test_another_file_is_not_overwritten(tmp_path, content):
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(stepmill.UsageError, match="is not for this evaluation"):
        play(forward, Walk, seeds=[0], resume=path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("num_bytes", [0, 30, -3])
def test_a_line_that_was_cut_off_is_played_again(tmp_path, num_bytes):
    path = tmp_path / "eval.jsonl"
    found = play(forward, Walk, seeds=range(6), resume=path, infos=["at"])
    whole = path.read_bytes()
    path.write_bytes(whole[:num_bytes])
    again = play(forward, Walk, seeds=range(6), resume=path, infos=["at"])
    assert facts(again) == facts(found)
    assert len(path.read_bytes().splitlines()) == 7


def test_a_damaged_line_is_refused(tmp_path):
    path = tmp_path / "eval.jsonl"
    play(forward, Walk, seeds=range(3), resume=path)
    path.write_text(path.read_text().replace('"seed"', '"speed"', 1))
    with pytest.raises(stepmill.UsageError, match="unexpected keyword argument 'speed'"):
        play(forward, Walk, seeds=range(3), resume=path)


@pytest.mark.parametrize(
    ("name", "value"), [("episode_return", "3"), ("length", 1.5), ("seed", "0"), ("success", "no"), ("infos", None)]
)
def test_a_row_with_a_value_of_another_type_is_refused(tmp_path, name, value):
    path = tmp_path / "eval.jsonl"
    play(forward, Walk, seeds=range(3), resume=path)
    *first, last = path.read_text().splitlines()
    path.write_text("\n".join([*first, json.dumps({**json.loads(last), name: value}), ""]))
    before = path.read_bytes()
    with pytest.raises(stepmill.UsageError, match=f"the {name} of an episode is {value!r}"):
        play(forward, Walk, seeds=range(3), resume=path)
    assert path.read_bytes() == before


class Holder:
    """Acts as `forward` does; the arrays that it has are in slots, closures and containers."""

    __slots__ = ("arrays", "nested")

    def __init__(self, array):
        self.arrays = [array]
        self.nested = {"f": lambda: array}

    def __call__(self, obs):
        return forward(obs)

    act = __call__


def with_closure(array):
    def policy(obs):
        assert array is not None
        return forward(obs)

    return policy


def with_default(array):
    def policy(obs, *, array=array):
        return forward(obs)

    return policy


def with_global(array):
    found = {"array": array, "forward": forward}
    exec("def policy(obs):\n    assert [array for _ in [0]]\n    return forward(obs)", found)
    return found["policy"]


def with_argument(array):
    return partial(lambda array, obs: forward(obs), np.array([array, None], dtype=object))


@pytest.mark.parametrize(
    "make",
    [Holder, lambda array: Holder(array).act, with_closure, with_default, with_global, with_argument],
    ids=["object", "method", "closure", "default", "global", "argument"],
)
def test_policies_that_differ_in_one_number_of_an_array_do_not_share_a_file(tmp_path, make):
    path = tmp_path / "eval.jsonl"
    weights = np.zeros(5000)
    play(make(weights), Walk, seeds=range(2), resume=path)
    play(make(weights.copy()), Walk, seeds=range(3), resume=path)
    weights[2500] = 1e-12
    with pytest.raises(stepmill.UsageError, match="its policy is"):
        play(make(weights), Walk, seeds=range(3), resume=path)


@pytest.mark.parametrize(
    "make",
    [
        lambda goal: {"tasks": {"far": {"goal": goal}}},
        lambda goal: {"tasks": [partial(lambda goal: Walk(), goal)], "env": None},
        lambda goal: {"env": partial(lambda goal: Walk(), goal)},
        lambda goal: {"success": lambda info: goal is not None},
    ],
    ids=["options", "env of a task", "env", "success"],
)
def test_tasks_and_envs_that_differ_in_one_number_of_an_array_do_not_share_a_file(tmp_path, make):
    path = tmp_path / "eval.jsonl"
    goal = np.zeros(5000)
    given = {"policy": forward, "env": Walk, "seeds": range(2), "resume": path}
    play(**{**given, **make(goal)})
    goal[2500] = 1e-9
    with pytest.raises(stepmill.UsageError, match=r"not for this evaluation: its (env|tasks|success) is"):
        play(**{**given, **make(goal)})


@pytest.mark.torch
def test_modules_that_differ_in_a_late_weight_or_a_buffer_do_not_share_a_file(tmp_path):
    torch = pytest.importorskip("torch")

    class Policy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.big = torch.nn.Parameter(torch.zeros(5000, dtype=torch.bfloat16))
            self.register_buffer("mean", torch.zeros(3), persistent=False)

        def forward(self, obs):
            return torch.where(obs[:, 0] < obs[:, 1], 2, 1)

    path, module = tmp_path / "eval.jsonl", Policy()
    play(module, Walk, seeds=range(2), resume=path)
    play(Policy(), Walk, seeds=range(3), resume=path)
    for tensor, place in ((module.big, 2500), (module.mean, 1)):
        with torch.no_grad():
            tensor[place] += 1
        with pytest.raises(stepmill.UsageError, match="its policy is"):
            play(module, Walk, seeds=range(3), resume=path)
        with torch.no_grad():
            tensor[place] -= 1


def test_infos_are_the_same_with_and_without_an_interruption(tmp_path):
    class Arrays(Walk):
        def step(self, action):
            *result, info = super().step(action)
            by_id = {np.int64(7): {(1, 2): 3}}
            return (*result, {**info, "goals": np.array([self.goal, self.at]), "by_id": by_id})

    path = tmp_path / "eval.jsonl"
    found = play(forward, Arrays, seeds=range(3), resume=path, infos=["goals", "by_id"])
    assert facts(play(forward, Arrays, seeds=range(3), resume=path, infos=["goals", "by_id"])) == facts(found)
    assert json.loads(found.to_json())["episodes"][0]["infos"]["by_id"] == {"7": {"(1, 2)": 3}}


def test_two_processes_do_not_write_one_file(tmp_path):
    path = tmp_path / "eval.jsonl"
    program = (
        "import stepmill, sys; from tests.evaluation.envs import Walk, forward\n"
        f"stepmill.evaluate(forward, Walk, seeds=range(4), backend='serial', resume={str(path)!r})"
    )
    refused = []

    def policy(obs):
        if not refused:
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
            )
            refused.append(done.stderr)
        return forward(obs)

    found = play(policy, Walk, seeds=range(4), resume=path)
    assert "another process writes it" in refused[0]
    assert len(path.read_bytes().splitlines()) == 1 + len(found.episodes)


def test_two_evaluations_of_a_process_do_not_write_one_file(tmp_path):
    path = tmp_path / "eval.jsonl"
    refused = []

    def policy(obs):
        if not refused:
            for _ in range(2):
                with pytest.raises(stepmill.UsageError, match="another evaluation of this process writes it") as caught:
                    play(policy, Walk, seeds=range(4), resume=path)
                refused.append(caught)
        return forward(obs)

    found = play(policy, Walk, seeds=range(4), resume=path)
    assert len(path.read_bytes().splitlines()) == 1 + len(found.episodes)
    assert facts(play(policy, Walk, seeds=range(4), resume=path)) == facts(found)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_what_has_ended_is_kept_if_the_policy_raises_or_the_user_interrupts(tmp_path, error):
    path = tmp_path / "eval.jsonl"
    calls = []

    def policy(obs):
        calls.append(len(obs))
        if len(calls) == 60:
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error
        return forward(obs)

    with pytest.raises(error):
        play(policy, Walk, seeds=range(40), resume=path)
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert 0 < len(rows) < 40
    known = {row["seed"] for row in rows}
    played = []

    def remaining(obs, episode_ids, is_first):
        played.extend(episode_ids[is_first].tolist())
        return forward(obs)

    remaining.__qualname__ = policy.__qualname__
    assert facts(play(remaining, Walk, seeds=range(40), resume=path)) == facts(play(forward, Walk, seeds=range(40)))
    assert sorted(played) == sorted({*range(40)} - known)
