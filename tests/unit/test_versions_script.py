"""Newer versions of CPython are tested in a chroot, and left out where there can be none."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test_versions.py"


@pytest.fixture
def versions(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("versions_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "versions_script", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CHROOT", tmp_path / "chroot")
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/sbin/{name}")
    return module


def test_without_root_or_debootstrap_there_is_a_reason(versions, monkeypatch):
    monkeypatch.setattr(versions.os, "geteuid", lambda: 1000)
    assert "needs root" in versions.why_no_chroot()
    monkeypatch.setattr(versions.os, "geteuid", lambda: 0)
    monkeypatch.setattr(versions.shutil, "which", lambda name: None)
    assert "debootstrap" in versions.why_no_chroot()


def test_a_chroot_is_made_once(versions, monkeypatch):
    commands = []

    class Done:
        returncode = 0

    def run(command, **_):
        commands.append(command)
        (versions.CHROOT / "etc" / "ssl" / "certs").mkdir(parents=True, exist_ok=True)
        return Done

    monkeypatch.setattr(versions.subprocess, "run", run)
    assert versions.why_no_chroot() is None
    assert versions.why_no_chroot() is None
    assert [command[0] for command in commands] == ["debootstrap"]


def test_a_debootstrap_that_fails_is_a_reason(versions, monkeypatch):
    class Failed:
        returncode = 1

    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: Failed)
    assert versions.why_no_chroot() == "debootstrap ended with status 1"
