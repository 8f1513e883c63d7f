"""The leak checks are checked: they report each kind of leak, and nothing after a clean test."""

import os
import subprocess
import sys
import threading

import pytest

from tests.harness import leaks


@pytest.fixture
def before() -> leaks.Footprint:
    return leaks.Footprint.take()


def test_nothing_is_found_where_nothing_was_left(before):
    assert leaks.find_leaks(before, grace_s=0) == []


def test_a_thread_is_found(before):
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    found = leaks.find_leaks(before, grace_s=0)
    gate.set()
    thread.join()
    assert [line.split()[0] for line in found] == ["thread"]


def test_a_descriptor_and_a_mapping_of_shared_memory_are_found(before):
    import mmap

    fd = os.memfd_create("stepmill-leak")
    os.ftruncate(fd, 4096)
    memory = mmap.mmap(fd, 4096)
    found = leaks.find_leaks(before, grace_s=0)
    memory.close()
    os.close(fd)
    kinds = {line.split()[0] for line in found}
    assert kinds == {"descriptor", "mapping"}
    assert any("stepmill-leak" in line for line in found)


def test_a_grandchild_whose_parent_died_is_found(before):
    # The child starts a sleeper, tells its pid, and leaves.
    source = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    child = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    found = leaks.find_leaks(before, grace_s=0)
    os.kill(int(child.stdout), 9)
    os.waitpid(int(child.stdout), 0)
    assert len(found) == 1
    assert "sleep 60" in found[0]


def test_a_zombie_is_found(before):
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    found = leaks.find_leaks(before, grace_s=0)
    child.wait()
    assert "(zombie)" in found[0]
