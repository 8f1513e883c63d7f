"""What the documents say is true of the code: their Python runs, their links lead somewhere, their tables are complete."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path

import pytest

from scripts import readme_faults
from stepmill.spec.options import OPTION_NAMES, RECORDS, PoolOptions
from stepmill.spec.ray_options import RayOptions
from stepmill.spec.records import default_of
from tests.frontends import guides
from tests.harness.scripts import ROOT, run_file

DOCS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.ipynb"), *ROOT.glob("benchmarks/*.md")]
)
FENCE = re.compile(r"^```(\w*)\s*$")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
MAKE = re.compile(r"\bmake ((?:[a-z-]+ )*[a-z-]+)$|`make ((?:[a-z-]+ )*[a-z-]+)`", re.MULTILINE)
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
ROW = re.compile(r"^\| (`[^|]+) \|([^|]*)\|", re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(path: Path) -> str:
    """A document as Markdown. The code cells of a notebook are its Python blocks."""
    if path.suffix == ".md":
        return path.read_text()
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]
    return "\n".join(f"```python\n{source}\n```" if kind == "code" else source for kind, source in cells)


def python_of(text: str) -> str:
    """The Python blocks of a document as one program, each line at its line number in the document."""
    lines, language = [], None
    for line in text.splitlines():
        fence = FENCE.match(line)
        if fence:
            language = fence[1] if language is None else None
        lines.append(line if language == "python" and not fence else "")
    return "\n".join(lines) + "\n"


def table_rows(document: str) -> dict[str, str]:
    """Names in backquotes in the first column of any table of a document, each with its second column."""
    rows = {}
    for first, second in ROW.findall((ROOT / document).read_text()):
        rows.update(dict.fromkeys(re.findall(r"`([^`]+)`", first), second.strip().strip("`")))
    return rows


def plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, id=name_of(path), marks=() if path.name in ("README.md", "quickstart.md") else pytest.mark.slow
        )
        for path in DOCS
        if python_of(text_of(path)).strip()
    ],
)
def test_the_python_of_a_document_runs_from_top_to_bottom(path, tmp_path):
    program = tmp_path / f"doc_{path.stem}.py"  # not gymnasium.py, which would hide the library
    program.write_text(python_of(text_of(path)))
    done = run_file(program)
    assert done.returncode == 0, f"line numbers are those of {name_of(path)}:\n{done.stderr}"
    expected = (
        "handled by the fault policy",
        "the program waited",
    )  # the second is the advice that a busy machine brings
    assert not [line for line in done.stderr.splitlines() if not line.startswith(expected)]


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_links_lead_to_files(path):
    targets = [target for target in LINK.findall(text_of(path)) if "://" not in target]
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_make_knows_the_targets_that_documents_name(path):
    known = set(TARGET.findall((ROOT / "Makefile").read_text()))
    named = {word for pair in MAKE.findall(text_of(path)) for group in pair for word in group.split()}
    assert named <= known


def test_the_table_of_options_is_complete_and_its_defaults_are_right():
    documented = table_rows("docs/options.md")
    names = [name for name in OPTION_NAMES if name not in {kind._option for kind in RECORDS}]
    names += [
        f"{kind._option}.{leaf}" for kind in RECORDS if kind is not RayOptions for leaf in kind.__dataclass_fields__
    ]
    wanted = {name: repr(plain(default_of(PoolOptions, name))) for name in names}
    assert {name: documented.get(name) for name in wanted} == wanted


def test_the_texts_of_errors_that_help_is_given_for_are_those_of_the_code():
    section = (ROOT / "docs/TROUBLE.md").read_text().partition("## An error is raised")[2].partition("\n## ")[0]
    texts = [text for first, _ in ROW.findall(section) for text in re.findall(r"`([^`]+)`", first)]
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".cpp"))
    assert texts
    assert [text for text in texts if text not in code] == []


def test_the_messages_of_dead_processes_that_help_is_given_for_are_those_of_the_code():
    section = (ROOT / "docs/TROUBLE.md").read_text().partition("## A process died")[2].partition("\n### ")[0]
    messages = [text for first, _ in ROW.findall(section) for text in re.findall(r"`([^`]+)`", first)]
    fixed = [part for message in messages for part in re.split(r"\b(?:worker )?\d+\b|(?=was ended)|SIG\w+", message)]
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".cpp"))
    parts = [part.strip() for part in fixed if len(part.strip()) > 5]
    assert len(parts) >= 5
    assert [part for part in parts if part not in code] == []


def test_the_tables_of_faults_in_the_readme_and_on_the_performance_page_agree():
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/performance.md"))
    assert readme_faults.rewritten(readme, page) == readme, "run: python scripts/readme_faults.py --write"


def test_every_page_is_in_the_navigation_of_the_site():
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text()
    listed = {line for block in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for line in block.split("\n")}
    pages = {path.relative_to(docs).with_suffix("").as_posix() for path in DOCS if path.is_relative_to(docs)}
    elsewhere = {"index", "options", "api_examples"}  # the page itself, and parts of the API reference
    assert sorted(page for page in pages - listed - elsewhere if not page.startswith("decisions/")) == []


@pytest.mark.torch
def test_the_guide_to_gpus_runs_on_a_cpu(tmp_path):
    pytest.importorskip("torch")
    guides.run_guide("../guides/gpu", tmp_path)


def test_every_decision_is_in_the_index():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    pages = sorted(path.name for path in folder.glob("0*.md"))
    assert [page for page in pages if f"]({page})" not in index] == []
