"""The package itself: what importing it loads, when it is refused, and the public names."""

import importlib.metadata
import re
import shutil
import subprocess
import sys

import pytest

import stepmill
from tests.harness.scripts import ROOT

HEAVY = {"torch", "gymnasium", "ray", "rich", "click", "cloudpickle"}


def run_python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def modules_after(statement: str) -> set[str]:
    answer = run_python(f"{statement}\nimport sys\nprint(*sys.modules)")
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.split())


def test_a_star_import_brings_every_public_name():
    names: dict[str, object] = {}
    exec("from stepmill import *", names)
    assert names.keys() >= set(stepmill.__all__)
    assert None not in names.values()


def test_a_clone_that_is_not_built_says_what_to_run(tmp_path):
    shutil.copytree(
        ROOT / "src" / "stepmill", tmp_path / "stepmill", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import stepmill"
    answer = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "is not built; run `pip install .`" in answer.stderr
    assert answer.returncode == 1


def test_the_docstring_of_a_package_lists_its_modules():
    for path in (ROOT / "src" / "stepmill").rglob("*.py"):
        if path.parent.name in ("stepmill", "kernels"):  # docs/ARCHITECTURE.md lists their modules
            continue
        docstring = path.with_name("__init__.py").read_text(encoding="utf-8").split('"""')[1]
        assert re.search(rf"\b{path.stem}\b", docstring) or path.stem == "__init__", path


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Pond'"):
        _ = stepmill.Pond


def test_importing_the_package_loads_neither_numpy_nor_another_library():
    assert not modules_after("import stepmill") & {*HEAVY, "numpy", "stepmill._native"}


@pytest.mark.covers("X-7/fresh")
def test_a_worker_starts_light():
    loaded = modules_after("import stepmill.worker.env_host, stepmill.worker.launcher")
    assert not loaded & (HEAVY - {"cloudpickle"})


def test_the_ground_floor_loads_numpy_and_no_native_code():
    loaded = modules_after("import stepmill.spec.env, stepmill.spec.options, stepmill.spec.errors, stepmill.spec.batch")
    assert not loaded & {*HEAVY, "stepmill._native"}


def test_the_version_has_one_home():
    assert importlib.metadata.version("stepmill") == stepmill.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", stepmill.__version__)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system_is_refused_in_one_sentence(platform):
    answer = run_python(f"import sys; sys.platform = {platform!r}\nimport stepmill")
    assert answer.returncode == 1
    assert re.search(rf"^ImportError: stepmill runs on Linux only, .*{platform}.*\.$", answer.stderr, re.MULTILINE)


def test_an_old_gymnasium_is_named_in_the_error():
    old = "import gymnasium; del gymnasium.vector.AutoresetMode; gymnasium.__version__ = '0.29.1'"
    answer = run_python(f"{old}\nimport stepmill; stepmill.VectorEnv")
    assert "ImportError: stepmill needs gymnasium>=1.1, but 0.29.1 is installed" in answer.stderr
