"""Which idle env the next task gets, and that choosing one takes few operations, however many there are."""

from __future__ import annotations

import sys
from types import FrameType

from hypothesis import given
from hypothesis import strategies as st

from stepmill.aio.seats import IdleSeats, Seat, Thread

NUM_THREADS, NUM_EACH = 3, 4


def make_seats(num_threads: int, num_each: int) -> tuple[IdleSeats, list[Seat]]:
    threads = [Thread(index, num_each) for index in range(num_threads)]
    seats = [Seat(env_id, threads[env_id % num_threads]) for env_id in range(num_threads * num_each)]
    idle = IdleSeats()
    for seat in seats:
        idle.put(seat)
    return idle, seats


@given(st.lists(st.tuples(st.sampled_from(["take", "put", "unbuild", "build"]), st.integers(0, 11)), max_size=80))
def test_the_best_idle_env_is_taken_after_any_operations(operations: list[tuple[str, int]]) -> None:
    idle, seats = make_seats(NUM_THREADS, NUM_EACH)
    order = list(seats)  # the last is the newest
    for name, env_id in operations:
        seat = seats[env_id]
        if name == "take":
            found = idle.take()
            assert (found is None) == (not order)
            if found is None:
                continue

            def cost(each: Seat) -> tuple[bool, int, int]:
                num_busy = NUM_EACH - sum(other.thread is each.thread for other in order)
                return not each.is_built, num_busy, each.thread.index

            best = min(map(cost, order))
            assert found is [each for each in order if cost(each) == best][-1]
            order.remove(found)
        elif name == "put" and seat not in order:
            idle.put(seat)
            order.append(seat)
        elif name == "unbuild" and seat.is_built:
            idle.mark_unbuilt(seat)
            if seat in order:
                order.remove(seat)
                order.append(seat)
        elif name == "build" and seat not in order:
            seat.is_built = True
    assert len(idle._heap) <= 2 * NUM_THREADS * (NUM_EACH + 1)


def test_taking_and_returning_all_envs_takes_a_number_of_operations_in_proportion_to_them() -> None:
    def num_events(num_threads: int, num_each: int) -> int:
        idle, _ = make_seats(num_threads, num_each)
        count = 0

        def record(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(record)
        try:
            for _ in range(2):
                taken = [idle.take() for _ in range(num_threads * num_each)]
                for seat in taken:
                    assert seat is not None
                    idle.put(seat)
        finally:
            sys.setprofile(None)
        return count

    for shape in ((16, 1), (1, 16)):
        large = num_events(*(16 * size if size > 1 else size for size in shape))
        small = num_events(*shape)
        assert large < 2 * 16 * small
