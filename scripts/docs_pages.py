"""Write build/site/source, from which Sphinx builds the site: docs/, and the pages that are made from other files.

Copied: docs/, the Markdown pages of the root, the notebooks. Generated: drawings, plots, the API reference, the command line,
the gallery of examples, and small inventories of other projects. Links between files of the repository become links between
pages; one that leads to no page fails the build.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import click
import docs_drawings
import docs_plots
from docs_api import api_pages

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site" / "source"
# Files of the repository that are pages of the site, and where.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "examples": "examples/index.md",
    "docs/decisions": "decisions/README.md",
    "docs/options.md": "api/options.rst",  # which has the rows of its tables as entries
}
_NOTEBOOK_PICTURES = {"quick_start": "drawings/data-path.svg", "watch_and_replay": "pictures/top.svg"}
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)((?:#[^)]*)?)(?=\))")
_IMAGE = re.compile(r"^!\[([^\]]*)\]\(([^)]+\.svg)\)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PY_FENCE = re.compile(r"^```py$", re.MULTILINE)


def target_of(path: str) -> str | None:
    """Return the page of the site for a path of the repository, or None if there is none."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    if re.fullmatch(r"examples/\w+\.py", path) and (ROOT / path).exists():
        return f"{path.removesuffix('.py')}.md"
    if path.startswith("examples/") and (ROOT / path).is_file():
        return path
    return None


def rewrite_links(text: str, path: str) -> str:
    """Return a page of the repository with links as they are on the site: absolute from the root of the site.

    Raises:
        SystemExit: a link leads to no page.
    """

    def rewrite(match: re.Match[str]) -> str:
        target, anchor = match.groups()
        if "://" in target or target.startswith(("/", "mailto:")):
            return f"{target}{anchor}"
        named = os.path.normpath(os.path.join(os.path.dirname(path), target))
        page = target_of(named)
        if page is None:
            raise SystemExit(f"{path}: the link to {target} leads to no page of the site")
        return f"/{page}{anchor if page.endswith('.md') else ''}"

    return _outside_code(text, lambda part: _LINK.sub(rewrite, part))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts, start = [], 0
    for code in _FENCE.finditer(text):
        parts += [change(text[start : code.start()]), code[0]]
        start = code.end()
    return "".join([*parts, change(text[start:])])


def inline_drawings(text: str, folder: Path) -> str:
    """Return a page with the SVG in place of each image of one, so that it takes the colours of the theme."""

    def inline(match: re.Match[str]) -> str:
        svg = (folder / match[2]).read_text(encoding="utf-8")
        svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>", "", svg, flags=re.DOTALL).strip()
        body = re.sub(r"\n\s*\n", "\n", svg)
        return f'```{{raw}} html\n<figure class="drawing" aria-label="{match[1]}">\n{body}\n</figure>\n```'

    return _IMAGE.sub(inline, text)


def copy_pages() -> None:
    """Copy docs/, and the Markdown files that lie elsewhere."""
    shutil.copytree(ROOT / "docs", SITE)
    named = {f"docs/{path.relative_to(ROOT / 'docs')}": path.relative_to(ROOT / "docs") for path in _markdown("docs")}
    pages = {
        source: Path(target)
        for source, target in PAGES.items()
        if source != "README.md" and source.endswith(".md") and target.endswith(".md")
    }
    for source, target in {**named, **pages}.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = inline_drawings(text, (ROOT / source).parent)
        text = _PY_FENCE.sub("```python", rewrite_links(text, source))
        (SITE / target).parent.mkdir(parents=True, exist_ok=True)
        (SITE / target).write_text(text, encoding="utf-8")
    options = SITE / "options.md"  # scripts/docs_api.py includes its prose
    options.write_text(options.read_text(encoding="utf-8").partition("\n## ")[0].partition("\n")[2], encoding="utf-8")


def list_decisions() -> None:
    """Add the decisions to the navigation: their index is a table, which Sphinx does not read as one."""
    folder = SITE / "decisions"
    names = "\n".join(sorted(path.stem for path in folder.glob("0*.md")))
    with (folder / "README.md").open("a", encoding="utf-8") as file:
        file.write(f"\n```{{toctree}}\n:hidden:\n\n{names}\n```\n")


def _markdown(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.md")) if path.name != "template.md"]


def write_inventories() -> None:
    """Write Sphinx's form of docs/inventories/*.txt, whose lines are: name, domain:role, address."""
    for source in sorted((ROOT / "docs" / "inventories").glob("*.txt")):
        if source.stem == "unlinked":
            continue
        lines = [line.split() for line in source.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
        entries = "".join(f"{name} {role} 1 {address} -\n" for name, role, address in lines)
        head = f"# Sphinx inventory version 2\n# Project: {source.stem}\n# Version: \n# The remainder is zlib.\n"
        data = head.encode() + zlib.compress(entries.encode())
        (SITE / "inventories" / f"{source.stem}.inv").write_bytes(data)


def command_line_page() -> str:
    """Return the page of the command line, made from the help texts."""
    from stepmill.cli.commands import group

    lines = ["# Command line", "", "The output of `--help`, as this version prints it.", ""]
    with click.Context(group, info_name="stepmill", **group.context_settings) as context:
        commands: list[tuple[str, click.Command, click.Context]] = [("stepmill", group, context)]
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if command is not None:
                commands.append((f"stepmill {name}", command, click.Context(command, info_name=name, parent=context)))
        for name, command, own in commands:
            own.max_content_width = own.terminal_width = 88
            lines += [f"## {name}", "", "```text", command.get_help(own), "```", ""]
    return "\n".join(lines)


def write_gallery() -> None:
    """Write a page for each example, and the index, which takes the first line of each docstring."""
    folder = SITE / "examples"
    folder.mkdir()
    shutil.copytree(ROOT / "examples" / "kernels", folder / "kernels")
    for notebook in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        shutil.copy(notebook, folder / notebook.name)
    outputs = ROOT / "examples" / "output"
    rows = []
    for program in sorted((ROOT / "examples").glob("*.py")):
        source = program.read_text(encoding="utf-8")
        text = ast.get_docstring(ast.parse(source)) or ""
        title = text.partition("\n")[0].removesuffix(".")
        page = [f"# {program.name}", "", _docstring_as_markdown(text), ""]
        printed = outputs / f"{program.stem}.txt"
        if printed.exists():
            shown = printed.read_text(encoding="utf-8").rstrip()
            page += ["## What it prints", "", "```text", shown, "```", ""]
        picture = next((path for path in _pictures_of(program) if path.exists()), None)
        if picture is None:
            raise SystemExit(f"{program.name} has no picture; make one of {_pictures_of(program)}")
        shown = os.path.relpath(picture, ROOT / "examples")
        page += ["## Result" if picture.parent == outputs else "## Picture", "", f"![{title}]({shown})", ""]
        shutil.copy(picture, folder / picture.name)
        page += ["## The program", "", "```python", source.rstrip(), "```", ""]
        body = inline_drawings("\n".join(page), ROOT / "examples")
        (folder / f"{program.stem}.md").write_text(body, encoding="utf-8")
        rows.append(f"| {_thumbnail(picture)} | [{program.name}]({program.stem}.md) | {title} |")
    names = [f"{path.stem}" for path in sorted((ROOT / "examples").glob("*.py"))]
    notebooks = [path.stem for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))]
    links = []
    for name in notebooks:
        picture = ROOT / "docs" / _NOTEBOOK_PICTURES[name]
        shutil.copy(picture, folder / picture.name)
        cells = json.loads((folder / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        title = "".join(cells[0]["source"]).partition("\n")[0].removeprefix("# ")
        links.append(f"| {_thumbnail(picture)} | [{name}.ipynb]({name}.ipynb) | {title} |")
    index = (ROOT / "docs" / "gallery.txt").read_text(encoding="utf-8")
    table = "\n".join(["| | program | |", "|---|---|---|", *links, *rows])
    toctree = "\n".join(["```{toctree}", ":hidden:", *notebooks, *names, "```"])
    (folder / "index.md").write_text(f"{index}\n{table}\n\n{toctree}\n", encoding="utf-8")


def _thumbnail(picture: Path) -> str:
    return f"![]({picture.name}){{width=160px}}"


def _pictures_of(program: Path) -> list[Path]:
    """Return where a picture of an example may be: its curve or bars, a picture of another page, a drawing."""
    drawing = "resume" if program.stem.endswith("_resume") else program.stem
    folders = {"examples/output": program.stem, "docs/pictures": program.stem, "docs/drawings": drawing}
    return [ROOT / folder / f"{name}.svg" for folder, name in folders.items()]


def _docstring_as_markdown(text: str) -> str:
    """Return a program's docstring as Markdown: its indented lines are commands."""
    return re.sub(r"^    (.+)$", r"```sh\n\1\n```", text, flags=re.MULTILINE)


def check_committed() -> None:
    """Exit with an error if a drawing or plot in the repository is not what its source gives."""
    wanted = {**docs_drawings.render_all(), **docs_plots.render_all()}
    stale = [path for path, svg in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != svg]
    if stale and "--write" not in sys.argv:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        raise SystemExit(f"out of date: {names}; run `build/docs-venv/bin/python scripts/docs_pages.py --write`")
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")


def main() -> None:
    """Write all pages."""
    check_committed()
    shutil.rmtree(SITE, ignore_errors=True)
    copy_pages()
    list_decisions()
    write_inventories()
    (SITE / "cli.md").write_text(command_line_page(), encoding="utf-8")
    write_gallery()
    (SITE / "api").mkdir()
    for name, text in api_pages().items():
        (SITE / "api" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
