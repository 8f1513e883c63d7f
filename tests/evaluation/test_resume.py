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


@pytest.mark.parametrize("content", [b"something", b"\xff\xfe\x00", b"[1]\n", b'{"a": 1}', b"3\n"])
def test_another_file_is_not_overwritten(tmp_path, content):
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(stepmill.UsageError, match="is not for this evaluation"):
        play(forward, Walk, seeds=[0], resume=path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("num_bytes", [0, 5, -3])
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
