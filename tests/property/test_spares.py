"""With spares, threads and processes do what the serial backend does, whatever is sent, received, reset and called."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.spare_envs import named_pool

NUM_ENVS = 3
IDS = st.lists(st.sampled_from(range(NUM_ENVS)), min_size=1, unique=True).map(sorted)
KINDS = ["step"] * 5 + ["send", "receive", "reset", "reset all", "call"]
MOVES = st.lists(
    st.tuples(st.sampled_from(KINDS), IDS, st.sampled_from([None, 7])), min_size=20, max_size=60
)  # of lists that may be short, few contain the end of an episode


def follow(moves, num_spares, seeding, **where):
    """All that a user sees of the pool for the `moves` that it does not refuse."""
    seen = []

    def note(batch):
        columns = (batch.obs, batch.reward, batch.terminated, batch.truncated, batch.env_id)
        seen.append([*(column.tolist() for column in columns), str(dict(batch.info))])

    with named_pool(NUM_ENVS, num_spares, seeding=seeding, **where) as pool:
        pool.reset(seed=1)
        sent = set()
        for kind, ids, seed in moves:
            if kind in ("send", "step") and (free := [i for i in ids if i not in sent]):
                pool.send([1] * len(free), free)
                sent |= set(free)
            if kind in ("receive", "step") and (known := [i for i in ids if i in sent]):
                note(pool.recv(env_ids=known))
                sent -= set(known)
            if kind.startswith("reset"):
                chosen = ids if kind == "reset" else list(range(NUM_ENVS))
                note(pool.reset(env_ids=chosen, seed=seed))
                sent -= set(chosen)
            if kind == "call":
                seen.append(pool.get_attr("identity", env_ids=ids))
    return seen


@pytest.mark.covers("A-12", "A-13", "A-14", "G-7", "X-6", "G-16/cases")
@pytest.mark.parametrize("seeding", ["continue", "per_episode", "fixed"])
@settings(max_examples=14, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moves=MOVES, num_spares=st.integers(1, 4), num_workers=st.integers(1, 4))
def test_threads_do_what_the_serial_backend_does(seeding, moves, num_spares, num_workers):
    expected = follow(moves, num_spares, seeding, backend="serial")
    assert follow(moves, num_spares, seeding, backend="thread", num_workers=num_workers) == expected


@pytest.mark.covers("A-12", "A-13", "A-14", "G-7", "X-6", "G-16/cases")
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(MOVES, st.integers(1, 3), st.integers(1, 3))
def test_processes_do_what_the_serial_backend_does(moves, num_spares, num_workers):
    expected = follow(moves, num_spares, "per_episode", backend="serial")
    assert follow(moves, num_spares, "per_episode", backend="process", num_workers=num_workers) == expected


SEEDED = st.dictionaries(st.sampled_from(range(NUM_ENVS)), st.one_of(st.none(), st.integers(0, 999)), min_size=1)
ORDERS = st.one_of(
    st.tuples(st.just("step")),
    st.tuples(st.just("send"), IDS),
    st.tuples(st.just("reset"), SEEDED),
    st.tuples(st.just("reset while stepping"), IDS, SEEDED),
)


class Episodes:
    """What the user knows of each env's episode, and whether each row that is received may follow it."""

    def __init__(self):
        self.last = {}  # env: object, its number of resets, clock, whether the episode ended

    def check(self, batch, seeds):
        """`seeds`: of the envs that this batch's rows reset."""
        for row, env in enumerate(batch.env_id.tolist()):
            identity, resets, clock = batch.obs[row, :3].tolist()
            before = self.last.get(env)
            if env in seeds or before is None or before[3]:
                assert (clock, bool(batch.terminated[row])) == (0, False), f"env {env} has lost its first observation"
                given = batch.info["given"][row]
                assert seeds.get(env) in (None, given), f"env {env} was reset with seed {given}"
            else:
                assert (identity, resets, clock) == (*before[:2], before[2] + 1), f"env {env} has jumped"
            self.last[env] = (identity, resets, clock, bool(batch.terminated[row]))


@pytest.mark.parametrize("where", [{"backend": "thread", "num_workers": 3}, {"backend": "process", "num_workers": 2}])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    orders=st.lists(ORDERS, min_size=20, max_size=60),
    num_spares=st.integers(1, 4),
    seeding=st.sampled_from(["continue", "per_episode", "fixed"]),
    on_fault=st.sampled_from(["raise", "truncate"]),
)
def test_a_partial_reset_with_seeds_keeps_no_first_observation_from_the_user(
    where, orders, num_spares, seeding, on_fault
):
    episodes = Episodes()
    with named_pool(NUM_ENVS, num_spares, seeding=seeding, on_fault=on_fault, **where) as pool:
        episodes.check(pool.reset(seed=1), dict.fromkeys(range(NUM_ENVS)))
        for kind, *rest in orders:
            if kind == "step":
                episodes.check(pool.step([1] * NUM_ENVS), {})
            elif kind == "send":
                pool.send([1] * len(rest[0]), rest[0])
                episodes.check(pool.recv(env_ids=rest[0]), {})
            elif kind == "reset":
                episodes.check(pool.reset(seed=rest[0], env_ids=sorted(rest[0])), rest[0])
            else:
                ids, seeds = rest
                pool.send([1] * len(ids), ids)
                pool.reset_async(seed=seeds, env_ids=sorted(seeds))
                episodes.check(pool.recv(env_ids=sorted({*ids, *seeds})), seeds)
