"""Whatever is sent, received, reset and called: with spares, threads and processes do what the serial backend does."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.spare_envs import named_pool

NUM_ENVS = 3
IDS = st.lists(st.sampled_from(range(NUM_ENVS)), min_size=1, unique=True).map(sorted)
MOVES = st.one_of(
    st.tuples(st.just("send"), IDS),
    st.tuples(st.just("receive"), IDS),
    st.tuples(st.just("reset"), IDS, st.sampled_from([None, 7])),
    st.tuples(st.just("reset all"), st.sampled_from([None, 7])),
    st.tuples(st.just("call"), IDS),
)


def follow(moves, num_spares, seeding, **where):
    """All that the pool hands out as it follows `moves`, those aside that it would refuse."""
    seen = []
    with named_pool(NUM_ENVS, num_spares, seeding=seeding, **where) as pool:
        pool.reset(seed=1)
        sent = set()
        for kind, *rest in moves:
            ids = rest[0] if kind != "reset all" else list(range(NUM_ENVS))
            if kind == "send" and (free := [i for i in ids if i not in sent]):
                pool.send([1] * len(free), free)
                sent |= set(free)
            elif kind == "receive" and (known := [i for i in ids if i in sent]):
                seen.append(pool.recv(env_ids=known))
                sent -= set(known)
            elif kind.startswith("reset"):
                seen.append(pool.reset(env_ids=ids, seed=rest[-1]))
                sent -= set(ids)
            elif kind == "call":
                seen.append(pool.get_attr("identity", env_ids=ids))
    return [(each.obs.tolist(), each.terminated.tolist()) if hasattr(each, "obs") else each for each in seen]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(MOVES, max_size=60),
    st.integers(1, 4),
    st.sampled_from(["continue", "per_episode", "fixed"]),
    st.integers(1, 4),
)
def test_threads_do_what_the_serial_backend_does(moves, num_spares, seeding, num_workers):
    expected = follow(moves, num_spares, seeding, backend="serial")
    assert follow(moves, num_spares, seeding, backend="thread", num_workers=num_workers) == expected


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(MOVES, min_size=20, max_size=60), st.integers(1, 3), st.integers(1, 3))
def test_processes_do_what_the_serial_backend_does(moves, num_spares, num_workers):
    expected = follow(moves, num_spares, "per_episode", backend="serial")
    assert follow(moves, num_spares, "per_episode", backend="process", num_workers=num_workers) == expected
