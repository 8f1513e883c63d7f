"""Sphinx's settings. `make docs` builds from build/site/source, where scripts/docs_pages.py puts this folder and the generated pages."""

import html
import os
import re
import sys
import textwrap
from collections.abc import Collection
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from docutils import nodes  # noqa: E402

import stepmill  # noqa: E402
from stepmill.spec.records import Record  # noqa: E402

project = "stepmill"
author = "The stepmill authors"
copyright = "The stepmill authors, Apache-2.0"  # noqa: A001 - Sphinx's name
version = release = stepmill.__version__
root_doc = "index"
html_theme = "furo"
html_title = f"stepmill {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_search_scorer = str(HERE / "search_scorer.js")
html_copy_source = False
html_show_sphinx = False
templates_path: list[str] = []
exclude_patterns = ["decisions/template.md", "options.md", "api_examples.md", "requirements.txt"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_in_temp = True  # the notebooks write files
nb_execution_raise_on_error = True
nb_merge_streams = True

# Single backquotes in docstrings are code.
default_role = "code"
smartquotes_action = "De"  # dashes and ellipses; quotation marks are mostly those of values
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 88
add_module_names = False
# Libraries that the site's environment does not have. Front-ends that subclass their classes are documented without them.
autodoc_mock_imports = ["jax", "stable_baselines3", "tensordict", "tianshou", "torch", "torchrl"]

# Without a network, references to other projects use the names in docs/inventories; a name that is missing there fails the
# build, and is added by hand.
_PROJECTS = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "gymnasium": "https://gymnasium.farama.org/",
    "torch": "https://docs.pytorch.org/docs/stable/",
}
_IS_ONLINE = os.environ.get("STEPMILL_DOCS_ONLINE") == "1"
intersphinx_mapping = {
    name: (url, None if _IS_ONLINE else str(HERE / "inventories" / f"{name}.inv")) for name, url in _PROJECTS.items()
}
intersphinx_timeout = 10
# Names that only type checkers and readers of the source need: type variables, aliases, and classes of libraries without
# public documentation. One name or pattern a line.
nitpick_ignore_regex = [
    (r"py:.*", line)
    for line in (HERE / "inventories" / "unlinked.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]

_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):", re.MULTILINE)
_texts: dict[str, list[str]] = {}


def _as_rst(lines: list[str]) -> list[str]:
    """Return a docstring whose few plain-text habits are written as reStructuredText wants them."""
    changed: list[str] = []
    last = ""  # the last line that is not empty
    for line in lines:
        text = re.sub(r"(?<![`\w*\\])\*\*(?=[a-z_])", r"\\*\\*", line)  # `**keywords` is not bold
        text = re.sub(r"(`\w+`)s\b", r"\1\\ s", text)
        text = re.sub(
            r"^ +\w+(, \w+)+(?=: )", lambda names: names[0].replace(", ", ","), text
        )  # several names, one text
        is_code = text.startswith("    ") and not changed[-1] and not last.startswith(" ") and not last.endswith(":")
        changed += ["::", "", text] if is_code else [text]
        last = text or last
    return changed


def _with_entries(lines: list[str], name: str, fields: Collection[str]) -> list[str]:
    """Return a dataclass's docstring whose section of attributes, the last one, is an entry for each, with its type and default."""
    begin, section = lines[: lines.index("Attributes:")], lines[lines.index("Attributes:") + 1 :]
    entries: list[str] = []
    texts = re.split(r"^    (?=\S)", "\n".join(section), flags=re.MULTILINE)[1:]
    for names, _, text in (each.partition(": ") for each in texts):
        body = [f"   {line.strip()}" for line in (text[:1].upper() + text[1:]).splitlines()]
        if not set(names.split(",")) <= set(fields):
            return lines
        entries += [line for each in names.split(",") for line in (f".. autoattribute:: {name}.{each}", "", *body, "")]
    return [*begin, *entries]


def _keep_text(_app: object, what: str, name: str, obj: object, _options: object, lines: list[str]) -> None:
    """Change a docstring before napoleon reads it, and remember the texts of properties."""
    lines[:] = _as_rst(lines)
    if isinstance(obj, type) and "Attributes:" in lines:
        if issubclass(obj, Record):  # scripts/docs_api.py has the entries
            lines[:] = lines[: lines.index("Attributes:")]
        elif is_dataclass(obj):
            lines[:] = _with_entries(lines, name, obj.__dataclass_fields__)
    if what in {"property", "attribute"} and not _SECTION.search("\n".join(lines)):
        _texts[name] = lines.copy()


def _restore_text(_app: object, _what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Undo what napoleon does with a property whose text has a colon: it takes the words before it for a type."""
    if name in _texts:
        lines[:] = _texts.pop(name)


def _without_misplaced(
    _app: object, _what: str, _name: str, _obj: object, _options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Leave out the arguments that catch positions which a class does not take."""
    return signature and (re.sub(r"\*misplaced: [^,)]+", "*", signature), returns)


def _describe(_app: object, _page: str, _template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give a page a description for search engines: the beginning of its text, without the date of a decision."""
    found = [each.astext() for each in doctree.findall(nodes.paragraph)] if doctree else []
    beginning = " ".join([each for each in found if not each.startswith("Date: ")][:6])
    if beginning:
        text = html.escape(textwrap.shorten(beginning, 160, placeholder=" …"))
        context["metatags"] = f'{context.get("metatags", "")}\n<meta name="description" content="{text}" />'


def setup(app: Any) -> None:
    """Connect the functions that change docstrings and signatures."""
    app.connect("html-page-context", _describe)
    app.connect("autodoc-process-signature", _without_misplaced)
    app.connect("autodoc-process-docstring", _keep_text, priority=400)
    app.connect("autodoc-process-docstring", _restore_text, priority=600)
