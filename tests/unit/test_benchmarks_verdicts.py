"""The benchmark of verdicts: what it sees of a fault, and the table of the guide."""

import asyncio
import json

from benchmarks import verdicts
from benchmarks.readme import replace_block

LIMITS = {"limit_s": 60.0, "later_s": 60.0}  # of a busy machine


def system(name: str) -> str:
    return next(title for title in verdicts.SYSTEMS if name in title)


def test_a_verdict_that_kills_its_process_loses_no_neighbour_of_an_env_per_worker():
    found = asyncio.run(verdicts.see_fault(system("envs_per_worker=1"), "die", 1, **LIMITS))
    assert (found["lost"], found["later"]) == (0, verdicts.NUM_NEIGHBOURS)


def test_a_verdict_that_kills_its_process_ends_an_executor_with_its_neighbours():
    found = asyncio.run(verdicts.see_fault(system("ProcessPoolExecutor"), "die", 1, **LIMITS))
    assert found["lost"] > 0 == found["later"]  # on a busy machine, some end before the executor knows of the death


def test_the_speed_counts_all_verdicts_and_the_time_of_all_processes():
    found = asyncio.run(verdicts.measure_speed(system("num_envs=64"), 640))
    assert found["per_s"] > 0 <= found["others"] < 1
    assert found["cpu_us"] >= 0


def test_the_table_of_the_guide_is_that_of_the_results():
    results = json.loads(verdicts.VALUES.read_text())
    page = verdicts.PAGE.read_text()
    assert page == replace_block(page, "verdicts", verdicts.to_block(results))
    results["systems"]["Pebble `ProcessPool`"]["per_s"] *= 1.5
    assert page != replace_block(page, "verdicts", verdicts.to_block(results))
