"""Files of saved envs that someone has changed, and whose checksum is right: `python -m tests.forged [--files 3000] [--first 0]`.

Each file is one of several kinds of envs with changed bytes, or with another part, and a new checksum. It is restored without `trust`, with and
without `strict`, and a file that is accepted is played on. Prints how many were refused, how many gave the saved envs, and how many gave other
ones; ends with 1 if code of the file ran, if something else than a StepmillError was raised, or if a call did not end. A checksum is no
signature: values that a pool can have, such as another seed of an episode to come, are accepted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import pickle
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import stepmill
from stepmill import _native
from stepmill.spec.container import pack, unpack
from tests.contract.test_saved_kinds import make_pool, sample
from tests.contract.test_saving import SERIAL, Wanderer, read_state, record, set_state

_KIND = "file of saved envs"
NUM_STEPS = 30
LIMIT_S = 2.0  # of processor time for each file


class Payload:
    """What a forged file would run."""

    num_runs = 0

    def __reduce__(self) -> Any:
        return Payload.run, ()

    @staticmethod
    def run() -> None:
        Payload.num_runs += 1


def _pool(kind: str) -> stepmill.Pool:
    if kind == "state":
        return stepmill.Pool([Wanderer] * 2, **SERIAL)
    return make_pool(kind, "kernel" if kind == "kernel" else "serial", {})


KINDS = ["dict", "spares", "agents", "text", "batched", "kernel", "state", "toy text"]


def play(pool: stepmill.Pool, first: Any) -> list[Any]:
    """Return the newest batch and those of the next steps, whose actions are the same for all pools."""
    numbers = np.random.default_rng(1)
    if not pool.spec.agents:
        pool.single_action_space.seed(1)
    return [record(first), *(record(pool.step(sample(pool, numbers))) for _ in range(NUM_STEPS))]


def saved_file(kind: str, path: str) -> tuple[bytes, list[Any]]:
    """Return a file that is saved in the middle of episodes, and how its envs go on."""
    with _pool(kind) as pool:
        numbers = np.random.default_rng(0)
        if not pool.spec.agents:
            pool.single_action_space.seed(0)
        batch = pool.reset(seed=3)
        for _ in range(12):
            batch = pool.step(sample(pool, numbers))
        stepmill.save(pool, path, state=(read_state, set_state) if kind == "state" else None)
        return Path(path).read_bytes(), play(pool, batch)


def replace(value: Any, rng: random.Random) -> Any:
    """Return a value of the file in which one part is another value."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(list(value))
        return {**value, key: replace(value[key], rng)}
    if type(value) in (list, tuple) and value and rng.random() < 0.95:
        place = rng.randrange(len(value))
        return type(value)([*value[:place], replace(value[place], rng), *value[place + 1 :]])
    if isinstance(value, np.ndarray) and value.size and value.dtype != object and rng.random() < 0.5:
        changed = value.copy()
        changed.reshape(-1).view(np.uint8)[rng.randrange(changed.nbytes)] ^= 1 << rng.randrange(8)
        return changed
    if isinstance(value, int) and rng.random() < 0.7:
        return rng.choice([value + 1, value - 1, -value, 0, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)])
    if isinstance(value, bytes) and value and rng.random() < 0.5:
        place = rng.randrange(len(value))
        return value[:place] + bytes([rng.randrange(256)]) + value[place + 1 :]
    return rng.choice(
        [
            None,
            -1,
            0,
            1 << 62,
            1.5,
            float("nan"),
            b"",
            "",
            (),
            [],
            {},
            np.zeros(0),
            np.zeros((3, 3)),
            np.float32(3),
            Payload(),
        ]
    )


def forge(data: bytes, rng: random.Random) -> bytes:
    """Return a changed file with the right checksum."""
    header, payload = unpack(_KIND, data)
    header.pop("kind")
    way, place = rng.choice([0, 1, 2, 3, 4, 4, 4, 4, 5, 6]), rng.randrange(len(payload))
    size = rng.choice([1, 1, 1, 2, 4, 8])
    if way == 0:
        payload = payload[:place]
    elif way == 1:  # a number of 8 bytes
        number = rng.choice([0, 1, 255, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, len(payload)])
        payload = payload[:place] + number.to_bytes(8, "little") + payload[place + 8 :]
    elif way == 2:  # another part of the file
        other = rng.randrange(len(payload))
        payload = payload[:place] + payload[other : other + 16 * size] + payload[place + 16 * size :]
    elif way == 3:  # bytes more or fewer
        payload = payload[:place] + rng.choice([b"", rng.randbytes(size)]) + payload[place + size :]
    elif way == 4:  # another value, which may be one that is pickled and not named in the header
        values = replace(_native.decode(payload, pickle.loads), rng)
        payload = _native.encode(values, pickle.dumps)
    elif way == 5:
        payload = payload[:place] + bytes([payload[place] ^ (1 << rng.randrange(8))]) + payload[place + 1 :]
    else:
        payload = payload[:place] + rng.randbytes(size) + payload[place + size :]
    return pack(_KIND, header, payload)


def restore(kind: str, path: str, *, strict: bool) -> Iterator[str | list[Any]]:
    state = (read_state, set_state) if kind == "state" else None
    with _pool(kind) as pool:
        try:
            batch = stepmill.restore(pool, path, strict=strict, state=state)
        except stepmill.StepmillError:
            yield "refused"
            pool.reset(seed=3)  # the pool stays usable
            return
        if batch is None:
            yield "accepted without a batch"
        try:
            yield play(pool, batch)
        except stepmill.StepmillError as error:
            yield f"accepted, then {type(error).__name__}"


def fail(*_: object) -> None:
    raise TimeoutError("a restore, or a step after it, does not end")


@contextlib.contextmanager
def limit_is_kept() -> Iterator[None]:
    """Let `judge` end a file that takes longer than LIMIT_S of processor time."""
    before = signal.signal(signal.SIGPROF, fail)
    try:
        yield
    finally:
        signal.signal(signal.SIGPROF, before)


def judge(kind: str, path: str, expected: list[Any], *, strict: bool) -> str:
    """Return what became of a file."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        found = list(restore(kind, path, strict=strict))[-1]
    except Exception as exc:
        return f"WRONG: {type(exc).__name__}: {exc}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if Payload.num_runs:
        return "WRONG: code of the file ran"
    if isinstance(found, str):
        return found
    return "accepted, the same" if found == expected else "accepted, other values"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("stepmill").setLevel(logging.CRITICAL)
    results: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in given.kinds}
    with tempfile.TemporaryDirectory() as folder, limit_is_kept():
        path = os.path.join(folder, "envs")
        saved = {kind: saved_file(kind, path) for kind in given.kinds}
        for number in range(given.first, given.first + given.files):
            kind = given.kinds[number % len(given.kinds)]
            data, expected = saved[kind]
            Path(path).write_bytes(forge(data, random.Random(number)))
            found = judge(kind, path, expected, strict=number % 3 > 0)
            results[kind][found.partition(":")[0]] += 1
            if found.startswith("WRONG"):
                print(f"--kinds {kind!r} --first {number} --files 1: {found}", file=sys.stderr, flush=True)
    for kind, counts in results.items():
        print(f"{kind:10}", ", ".join(f"{count} {found}" for found, count in sorted(counts.items())), flush=True)
    return int(any(counts["WRONG"] for counts in results.values()))


if __name__ == "__main__":
    sys.exit(main())
