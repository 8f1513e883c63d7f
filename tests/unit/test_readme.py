"""The first page: its length, and its lines that install something; and the plot of the no-op env."""

import importlib.metadata
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
TEXT = re.compile(r'<text style="[^"]*" x="[\d.]+" y="([\d.]+)"[^>]*>([^<]+)</text>')


def noop_rows() -> list[str]:
    page = (ROOT / "docs" / "performance.md").read_text()
    block = page.partition("<!-- noop:begin -->")[2].partition("<!-- noop:end -->")[0]
    return re.findall(r"^\| (?:\*\*)?(\w[^|]*?) \|", block, re.MULTILINE)[1:]


def plot_labels() -> dict[str, float]:
    """The names at the ends of lines in the plot, each with its height in points."""
    plot = (ROOT / "docs" / "plots" / "noop.svg").read_text()
    return {text: float(y) for y, text in TEXT.findall(plot) if re.match(r"[A-Za-z]", text) and " of envs" not in text}


def test_the_readme_has_at_most_100_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_every_engine_of_the_table_is_in_the_plot_of_the_no_op_env():
    engines = {re.split(r"[ ,*]", row)[0] for row in noop_rows()}
    assert {"stepmill", "Gymnasium", "SB3", "Tianshou", "TorchRL", "PufferLib"} <= engines
    assert {label.split()[0] for label in plot_labels()} >= engines
    assert {"stepmill serial", "stepmill process", "Gymnasium Sync", "Gymnasium Async"} <= set(plot_labels())


def test_no_name_in_the_plot_of_the_no_op_env_lies_over_another():
    heights = sorted(height for label, height in plot_labels().items() if label != "env-steps/s")
    letters = 10  # points
    assert all(above - below > letters for below, above in itertools.pairwise(heights))


def test_what_pages_install_works_in_a_clone_before_there_is_a_release():
    extras = set(importlib.metadata.metadata("stepmill").get_all("Provides-Extra") or ())
    found = {path.name: re.findall(r"pip install '([^']+)'", path.read_text()) for path in PAGES}
    assert found["sb3.md"] == [".[sb3]"]
    named = {line for page, lines in found.items() if page != "TROUBLE.md" for line in lines}
    unknown = [line for line in named if not line.startswith(".[") or set(line[2:-1].split(",")) - extras]
    assert unknown == []
