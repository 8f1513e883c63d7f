"""A worker that writes random bytes over all that it can write: its learner neither crashes nor hangs, others lose nothing.

What it cannot write is the subject of test_slab_protection.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill import _native
from stepmill.slab.layout import LEASE_BYTES
from stepmill.testing.envs import CountingEnv
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import await_ready, begun
from tests.harness.slab_memory import slab_address, write_slab

NUM_SEEDS = 6
STEP_S = 0.4
BYSTANDERS = {0, 1}
SCRIBBLE = 0x40  # neither 0 nor 1
Span = tuple[int, int]


def _memory(name: str) -> int:
    """Return a descriptor of this worker's memory of that name; descriptors that we inherit have it in their link."""
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if f"memfd:{name}" in os.readlink(entry.path):
                return int(entry.name)
    raise LookupError(name)


class ScribblingEnv(CountingEnv):
    """Writes random bytes once, in a step or in a call, to the places that the test has given."""

    def __init__(self, identity: int = 0) -> None:
        super().__init__(identity, length=1000)
        self._spans: Sequence[Span] = ()
        self._seed = 0
        self._words: dict[int, int] = {}
        self._is_mortal = False

    def plan(self, spans: Sequence[Span], seed: int) -> None:
        self._spans, self._seed = spans, seed

    def step(self, action: np.int64) -> Any:
        if self._spans:
            self.scribble(self._spans, self._seed)
            self._spans = ()
        if self._words:
            for place, word in self._words.items():
                write_slab(place, word.to_bytes(4, "little"))
            if self._is_mortal:
                os._exit(1)
            time.sleep(600)
        return super().step(action)

    def talk(self) -> dict[str, bytes]:
        return {"page": b"x" * 5000}

    def scribble(self, spans: Sequence[Span], seed: int) -> None:
        """Write into the slab: a few short strokes in each of the spans, or over all of it."""
        rng = random.Random(seed)
        for start, stop in spans:
            for _ in range(rng.choice([1, 1, 4, 40])):
                at = rng.randrange(start, stop)
                size = min(rng.choice([1, 4, 8, 64, stop - start]), stop - at)
                write_slab(at, rng.choice([rng.randbytes(size), b"\xff" * size, bytes(size)]))

    def scribble_pages(self, seed: int) -> None:
        """Write into the memory for large infos, and make it look larger than any memory."""
        rng = random.Random(seed)
        results = _memory("stepmill-results")
        size = max(os.fstat(results).st_size, 1)
        for _ in range(20):
            os.pwrite(results, rng.randbytes(rng.choice([1, 8, 16, 4096])), rng.randrange(size))
        os.ftruncate(results, rng.choice([0, 17, size, 2**40]))

    def babble(self, seed: int) -> None:
        """Write into the socket to the learner."""
        rng = random.Random(seed)
        for entry in list(os.scandir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith("socket:"):
                    os.write(int(entry.name), rng.randbytes(rng.choice([1, 7, 16, 64, 5000])))

    def scribble_flags(self, places: Sequence[int]) -> None:
        """From now on, write SCRIBBLE over these bytes of the slab without end, in a thread."""
        cells = [ctypes.c_ubyte.from_address(slab_address(place)) for place in places]

        def write() -> None:
            while True:
                for cell in cells:
                    cell.value = SCRIBBLE

        threading.Thread(target=write, daemon=True).start()

    def hang_with(self, places: dict[int, int], *, is_mortal: bool = False) -> None:
        """In the next step, write words (uint32) into the slab and hang, or die."""
        self._words, self._is_mortal = places, is_mortal


class LoquaciousEnv(ScribblingEnv):
    """Its observation has parts of no fixed size, and its infos do not fit their row."""

    def __init__(self, identity: int = 0) -> None:
        super().__init__(identity)
        self.observation_space = gymnasium.spaces.Dict(
            count=gymnasium.spaces.Box(-1, 2**40, (3,), np.int64), words=gymnasium.spaces.Text(10)
        )

    def reset(self, **arguments: Any) -> Any:
        obs, info = super().reset(**arguments)
        return {"count": obs, "words": "reset"}, {**info, **self.talk()}

    def step(self, action: np.int64) -> Any:
        obs, *rest, info = super().step(action)
        return {"count": obs, "words": "step"}, *rest, {**info, **self.talk()}


def make(env_class: type[ScribblingEnv], on_fault: str, **chosen: Any) -> stepmill.Pool:
    options = stepmill.PoolOptions(
        context="fork",
        on_fault=on_fault,
        step_timeout_s=STEP_S,
        reset_timeout_s=STEP_S,
        restarts={"max_restarts": 10_000, "restart_window_s": 0.001},
        **chosen,
    )
    return stepmill.Pool(
        [partial(env_class, env_id) for env_id in range(4)], backend="process", num_workers=2, options=options
    )


def spans_of(pool: stepmill.Pool, where: str) -> list[Span]:
    """Where the bytes lie that worker 1 can write: its control words, its rows of all data arrays, the shared words."""
    plan: dict[str, Any] = dict(pool._runtime.slab.plan)
    segment, end = plan["writable"].segments[1]
    first_row = min(offset for offset, _, _, _ in columns_of(plan))
    if where == "shared":
        return [(plan["shared_words"], plan["shared_words"] + _native.SHARED_WORDS_BYTES)]
    if where == "control":
        of_servers = segment + _native.server_word_offsets(len(plan["servers"][1]))["done"]
        return [(segment, of_servers), (of_servers, segment + first_row)]
    slots = [
        (offset, stride, size, slot)
        for offset, stride, size, _ in columns_of(plan)
        for slot in range(3 if stride else 1)
    ]
    starts = [(segment + offset + slot * stride, size) for offset, stride, size, slot in slots]
    assert all(start + 2 * size <= end for start, size in starts)
    return [(start, start + 2 * size) for start, size in starts]


def columns_of(plan: dict[str, Any]) -> list[tuple[int, int, int, bool]]:
    """Offset in the segment, slot stride, bytes of a row, and that it is split, of each data array."""
    names = ("reward", "terminated", "truncated", "episode_return", "over", "episode_length", "payload")
    return [*(plan[name] for name in names), *plan["observation"], *plan["final_observation"]]


def places_of(pool: stepmill.Pool, words: dict[str, int]) -> dict[int, int]:
    """Return `words` with places in the slab for names: words of worker 1, and of its first server."""
    plan: dict[str, Any] = dict(pool._runtime.slab.plan)
    words_of_worker = _native.counter_formats()["worker"]
    offsets = dict(zip(words_of_worker["names"], words_of_worker["offsets"], strict=True))
    offsets |= _native.server_word_offsets(len(plan["servers"][1]))
    return {plan["worker_words"][1] + offsets[name]: word for name, word in words.items()}


def scribble(pool: stepmill.Pool, where: str, seed: int) -> None:
    """Let env 2 do it: over its words and rows at once, or in its next step."""
    if where == "pages":
        pool.call("scribble_pages", seed, env_ids=[2])
    elif where == "socket":
        pool.call("babble", seed, env_ids=[2])
    else:
        pool.call("plan" if seed % 2 else "scribble", spans_of(pool, where), seed, env_ids=[2])


def use(pool: stepmill.Pool) -> None:
    """Step, look at everything, call. Bystanders have right results at once; errors are ours, and blame the others."""
    for act in (_step, _step, partial(_call, pool=pool), _step):
        begin = time.monotonic()
        assert not BYSTANDERS & _find_blamed(partial(act, pool=pool))
        assert time.monotonic() - begin < HANG_GUARD_S


def _find_blamed(act: Callable[[], None]) -> set[int]:
    """Return the envs that an error of ours names; an error of another kind is a failure."""
    try:
        act()
    except stepmill.StepmillError as error:
        return {*getattr(error, "env_ids", ()), getattr(error, "env_id", None)} - {None}
    return set()


def _step(pool: stepmill.Pool) -> None:
    idle = [env_id for env_id, state in enumerate(pool.states) if state is stepmill.EnvState.IDLE]
    if idle:
        pool.send([1] * len(idle), idle)
    while {stepmill.EnvState.BUSY, stepmill.EnvState.READY} & set(pool.states):
        batch = pool.recv(min_envs=1, max_envs=4, timeout_s=HANG_GUARD_S / 2)
        for row in np.flatnonzero(np.isin(batch.env_id, list(BYSTANDERS))):
            assert (batch.reward[row], batch.terminated[row], batch.truncated[row]) == (1.0, False, False)
        str(batch.info), str(batch.obs), batch.reward.sum(), batch.truncated.any()


def _call(pool: stepmill.Pool) -> None:
    pool.call_async("locate", env_ids=[2, 3]).result(timeout_s=1.0)


def heal(pool: stepmill.Pool) -> None:
    """Replace the worker that was scribbled over, and see that all is well, the bystanders' steps too."""
    steps = pool.get_attr("num_steps", env_ids=[0, 1])
    pool._revival.revive([2, 3], restart_living=True)
    assert pool.reset(seed=0).env_id.tolist() == [0, 1, 2, 3]
    for action in (5, 6):
        assert pool.step([action] * 4).reward.tolist() == [float(action)] * 4
    assert pool.get_attr("num_steps", env_ids=[0, 1]) == tuple(count + 2 for count in steps)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("env_class", "on_fault"),
    [
        (ScribblingEnv, "truncate"),
        (LoquaciousEnv, "raise"),
        pytest.param(ScribblingEnv, "raise", marks=pytest.mark.soak),
        pytest.param(LoquaciousEnv, "truncate", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("where", ["control", "rows", "shared", "pages", "socket"])
def test_a_worker_that_scribbles_harms_nobody_else(where: str, env_class: type[ScribblingEnv], on_fault: str) -> None:
    with make(env_class, on_fault) as pool:
        for seed in range(NUM_SEEDS):
            pool.reset(seed=0)
            pool.step([1] * 4)
            with contextlib.suppress(stepmill.StepmillError):
                scribble(pool, where, seed)
            use(pool)
            heal(pool)


def test_flags_are_0_or_1_whatever_a_worker_writes_there() -> None:
    with begun(make(ScribblingEnv, "raise")) as pool:
        plan: dict[str, Any] = dict(pool._runtime.slab.plan)
        segment = plan["segments"][1]
        places = [segment + plan[name][0] for name in ("terminated", "truncated", "over")]
        pool.call("scribble_flags", places, env_ids=[2])
        for _ in range(20):
            pool.send([1] * 4)
            wait_for_scribbles(pool, places)
            batch = pool.recv(4)
            for flags in (batch.terminated, batch.truncated):
                assert flags.view(np.uint8).tolist() == [0, 0, 1, 0]


def wait_for_scribbles(pool: stepmill.Pool, places: Sequence[int]) -> None:
    """Wait until all results are there, and the worker has written over its own since."""
    await_ready(pool, pool.num_envs)
    for place in places:
        while ctypes.c_ubyte.from_address(slab_address(place)).value != SCRIBBLE:
            os.sched_yield()


class MaskEnv(ScribblingEnv):
    """Its observation is a large array of bools, enough for leases."""

    def __init__(self, identity: int = 0) -> None:
        super().__init__(identity)
        self.observation_space = gymnasium.spaces.MultiBinary(LEASE_BYTES)
        self.observation_space.dtype = np.dtype(np.bool_)

    def _mask(self) -> Any:
        return np.zeros(LEASE_BYTES, np.bool_)

    def reset(self, **arguments: Any) -> Any:
        return self._mask(), super().reset(**arguments)[1]

    def step(self, action: np.int64) -> Any:
        return self._mask(), *super().step(action)[1:]


def test_large_bools_are_0_or_1_whatever_a_worker_writes_there() -> None:
    with begun(make(MaskEnv, "raise")) as pool:
        plan: dict[str, Any] = dict(pool._runtime.slab.plan)
        ((start, stride, size, _),) = plan["observation"]
        places = [start + slot * stride + 2 * size for slot in range(plan["num_slots"])]
        pool.call("scribble_flags", places, env_ids=[2])
        for _ in range(20):
            pool.send([1] * 4)
            wait_for_scribbles(pool, places)
            mask = pool.recv(4).obs.view(np.uint8)
            assert int(mask.max()) == mask[2, 0] == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "words",
    [
        {"current": 0xFFFFFFFF, "serving": 1},
        {"current": 1},
        {"running": 3},
        {"state": 0x12345678},
        {"done": 77},
        {"done": 77, "state": 0x12345678, "current": 0xFFFFFFFF, "serving": 1},
    ],
)
def test_a_worker_that_falsifies_its_own_words_does_not_escape_its_deadline(words: dict[str, int]) -> None:
    with begun(make(ScribblingEnv, "truncate", workers={"call_timeout_s": 0.5})) as pool:
        pool.step([1] * 4)
        pool.call("hang_with", places_of(pool, words), env_ids=[2])

        begin = time.monotonic()
        batch = pool.step([1] * 4)

        assert time.monotonic() - begin < HANG_GUARD_S
        assert batch.truncated.tolist() == [False, False, True, True]
        assert pool.step([1] * 4).truncated.tolist() == [False] * 4
        assert pool.step([1] * 4).truncated.tolist() == [False] * 4


@pytest.mark.parametrize("words", [{"state": 0x12345678}, {"done": 77, "state": 0x12345678}])
def test_who_never_waits_is_told_of_a_worker_that_falsified_its_words_and_died(words: dict[str, int]) -> None:
    with begun(make(ScribblingEnv, "raise")) as pool:
        pool.call("hang_with", places_of(pool, words), is_mortal=True, env_ids=[2])
        pool.send([1] * 4)
        assert pool.recv(env_ids=[0, 1]).reward.tolist() == [1, 1]

        begin = time.monotonic()
        told: list[stepmill.StepmillError] = []
        while not told and time.monotonic() - begin < HANG_GUARD_S:
            try:
                pool.recv(env_ids=[2], timeout_s=0)
            except stepmill.RecvTimeout:
                continue
            except stepmill.StepmillError as error:
                told.append(error)

        assert [type(error) for error in told] == [stepmill.WorkerDied]
        heal(pool)


def test_a_hole_is_not_taken_for_a_value(tmp_path: Path) -> None:
    # A file that only looks large must not make its reader ask for as much memory.
    with begun(make(LoquaciousEnv, "raise")) as pool:
        pool.send([1] * 4)
        await_ready(pool, 4)
        slab = pool._runtime.slab
        os.ftruncate(slab.fds[4], 2**45)
        assert pool.recv(4).obs["words"] == ("step",) * 4
