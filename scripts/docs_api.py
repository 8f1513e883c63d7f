"""The pages of the API reference: which public names are on which page. Every name of scripts/public_api.py is on one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import griffe
from public_api import PublicName, all_names

from stepmill.spec.options import RECORDS, PoolOptions
from stepmill.spec.records import Record, default_of


@dataclass(frozen=True)
class Page:
    """One page: the names of `stepmill` that it holds, and modules whose public names it holds all."""

    file: str
    title: str
    intro: str
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


_ERRORS = (
    "StepmillError", "UsageError", "BusyEnvError", "ClosedPoolError", "MissingExtraError", "EnvError", "BadOutput",
    "WorkerDied", "LauncherDied", "EnvTimeout", "RecvTimeout", "EngineBug",
)  # fmt: skip
PAGES = (
    Page("pool", "Pool", "Described in :doc:`/stepping`, :doc:`/episodes`, :doc:`/faults` and :doc:`/results`.", ("Pool", "monitor", "trace", "read_timers")),
    Page("saving", "save and restore", "The guide is :doc:`/guides/preempted`.", ("save", "restore", "SavedEnvs")),
    Page("vector_env", "VectorEnv and make_vec", "The differences to Gymnasium's classes are in :doc:`/switching/gymnasium`.", ("make_vec", "VectorEnv", "install_vector_entry_points")),
    Page("options", "Options and states", ".. include:: ../options.md\n   :parser: myst_parser.sphinx_", ("PoolOptions", "Restarts", "Resets", "Start", "Workers", "Tuning", "RayOptions", "AutoresetMode", "Context", "OnFault", "RetryIn", "Seeding", "EnvState")),
    Page("results", "Batch, Rollout and EnvSpec", "What a pool returns, and what it knows about an env.", ("Batch", "Received", "EnvFault", "Rollout", "RolloutBatch", "EnvSpec")),
    Page("tune", "tune", "The guide is in :doc:`/observe`.", ("tune", "TuneResult")),
    Page("aio", "asyncio", "The guide is :doc:`/guides/text_and_tools`.", ("AsyncPool", "EnvLease")),
    Page("evaluate", "evaluate", "The guide is :doc:`/guides/evaluate`.", ("evaluate", "EvaluateOptions", "Evaluation", "Episode")),
    Page("errors", "Errors", "All errors are subclasses of ``StepmillError``. What to do about each is in :doc:`/TROUBLE`.", _ERRORS),
    Page("kernels", "stepmill.kernels", "Envs in compiled code; the guide is :doc:`/kernels`.", ("kernel", "get_include"), ("stepmill.kernels",)),
    Page("arrays", "stepmill.torch and stepmill.jax", "Tensors and arrays of learners.", (), ("stepmill.torch", "stepmill.jax")),
    Page("timers", "stepmill.timers", "Hierarchical timers of envs and learners.", (), ("stepmill.timers",)),
    Page("testing", "stepmill.testing", "Checks for your own envs, back-ends and front-ends, and toy envs.", (), ("stepmill.testing",)),
    Page("envs", "stepmill.envs", "Envs of other libraries that need a wrapper or a description. Most are found by their class and need nothing.", ("foreign", "register_adapter"), ("stepmill.envs.pettingzoo", "stepmill.envs.ragged", "stepmill.envs.envpool", "stepmill.envs.atari_vector")),
    Page("backends", "stepmill.backends.base", "What a backend of your own has to do; the guide is :doc:`/guides/extending`.", (), ("stepmill.backends.base",)),
    Page("frontend_alf", "stepmill.frontends.alf", "The guide is :doc:`/switching/alf`.", (), ("stepmill.frontends.alf",)),
    Page("frontend_di_engine", "stepmill.frontends.di_engine", "The guide is :doc:`/switching/di_engine`.", (), ("stepmill.frontends.di_engine",)),
    Page("frontend_dm_env", "stepmill.frontends.dm_env", "One env as a ``dm_env.Environment``.", (), ("stepmill.frontends.dm_env",)),
    Page("frontend_mlagents", "stepmill.frontends.mlagents", "The guide is :doc:`/switching/mlagents`.", (), ("stepmill.frontends.mlagents",)),
    Page("frontend_multi_env", "stepmill.frontends.multi_env", "The guide is :doc:`/switching/multi_env`.", (), ("stepmill.frontends.multi_env",)),
    Page("frontend_pettingzoo", "stepmill.frontends.pettingzoo", "The guide is :doc:`/guides/multi_agent`.", (), ("stepmill.frontends.pettingzoo",)),
    Page("frontend_ray", "stepmill.frontends.ray_rollout", "Rollouts that are collected on the machines of a Ray cluster.", (), ("stepmill.frontends.ray_rollout",)),
    Page("frontend_sb3", "stepmill.frontends.sb3", "The guide is :doc:`/switching/sb3`.", (), ("stepmill.frontends.sb3",)),
    Page("frontend_tianshou", "stepmill.frontends.tianshou", "The guide is :doc:`/switching/tianshou`.", (), ("stepmill.frontends.tianshou",)),
    Page("frontend_torchrl", "stepmill.frontends.torchrl", "The guide is :doc:`/switching/torchrl`.", (), ("stepmill.frontends.torchrl",)),
)  # fmt: skip
# Classes of what public names return or take. They are not imported by users, but their members are used.
TYPES = (
    "stepmill.pool.requests.PoolFuture",
    "stepmill.pool.requests.PoolProperties",
    "stepmill.spec.stats.PoolStats",
    "stepmill.spec.stats.WorkerStats",
    "stepmill.spec.stats.LearnerStats",
    "stepmill.spec.stats.NodeStats",
    "stepmill.spec.stats.Durations",
    "stepmill.observe.monitor.Monitor",
    "stepmill.observe.tune_result.Trial",
    "stepmill.observe.tune_choice.Configuration",
    "stepmill.observe.tune_choice.EnvProfile",
    "stepmill.evaluation.result.Summary",
    "stepmill.spec.options.BackendName",
    "stepmill.spec.batch.Players",
    "stepmill.envs.Adapter",
    "stepmill.spec.tree.Leaf",
    "stepmill.spec.tree.LeafKind",
    "stepmill.spec.tree.DictNode",
    "stepmill.spec.tree.TupleNode",
    "stepmill.spec.tree.Opaque",
    "stepmill.spec.env.TimeStepFields",
    "stepmill.envs.env_adapter.EnvAdapter",
    "stepmill.frontends.gymnasium.make.VectorEntryPoints",
)
# Public under two names; described under the other one.
_ALIASES = {
    "stepmill.kernels.kernel",
    "stepmill.kernels.get_include",
    "stepmill.kernels",
    "stepmill.testing",
    "stepmill.timers",
}
_ALIAS_MODULES = {"stepmill.frontends.gymnasium"}
_WITHOUT_EXAMPLE = {
    "stepmill.torch.CudaCopier",  # TensorPool makes it; it needs a GPU
    "stepmill.frontends.di_engine.EnvState",  # its members are listed
}
_DOCS = Path(__file__).resolve().parent.parent / "docs"
_IMPORT = re.compile(r"^(?:import|from) .*\b(\w+)$", re.MULTILINE)
# Methods that users call and a class of another library defines, with text of our own.
_INHERITED = {
    "stepmill.VectorEnv": ("close(timeout=None, terminate=False)", "Close the envs and end the workers; see `close_extras`. A second call does nothing.")
}  # fmt: skip
_EXAMPLE = re.compile(r"^## ([^\n]+)\n\n```(?:py|python|ray)\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # names, program
_TEXT = re.compile(r"\"[^\"\n]*\"|#.*")  # strings and comments, whose words need no import
_OPTION_TABLES = {"options": "", "scaling": "ray."}  # the pages that have them, and what their names begin with
_OPTION_ROW = re.compile(r"^\| `([\w.]+)` \|[^|]*\| (.*) \| (.*) \|$", re.MULTILINE)  # name, default, values, meaning
_MARKDOWN_LINK = re.compile(r"\[([^]]+)\]\((?:([\w/-]+)\.md)?(#[^)]*)?\)")


def api_pages() -> dict[str, str]:
    """Return the pages by file name.

    Raises:
        SystemExit: a public name is on no page, or an option is in no table.
    """
    names = {name.path: name for name in all_names()}
    examples = _examples(names)
    shown = {path for page in PAGES for path in _paths(page, names)} | _ALIASES
    missing = [path for path, name in names.items() if path not in shown and name.module not in _ALIAS_MODULES]
    if missing:
        raise SystemExit(f"on no page of the API reference: {', '.join(missing)}; add them to scripts/docs_api.py")
    pages = {f"{page.file}.rst": _page(page, names, examples) for page in PAGES}
    pages["types.rst"] = "\n".join(
        [_title("Other types"), "What some of the public names return or take.", ""]
        + [line for path in TYPES for line in (f".. autoclass:: {path}", "   :members:", "")]
    )
    return {**pages, "index.rst": _index(names)}


def _index(names: dict[str, PublicName]) -> str:
    """Return the index: a line for each class and function, below the title of its page."""
    lines = [_title("API reference"), "Every public name. Other names may change without notice.", ""]
    lines += [".. toctree::", "   :hidden:", "", *(f"   {page.file}" for page in PAGES), "   types", ""]
    for page in PAGES:
        lines += [f".. rubric:: :doc:`{page.title} <{page.file}>`", ""]
        for path in _paths(page, names):
            found = names[path].definition
            is_shown = path not in _ALIASES or names[path].module == "stepmill"
            if is_shown and isinstance(found, (griffe.Class, griffe.Function)):
                text = (found.docstring.value if found.docstring else "").partition("\n\n")[0].replace("*", "\\*")
                lines += [f"* :py:obj:`{path.removeprefix('stepmill.')} <{path}>`: {' '.join(text.split())}"]
        lines += [""]
    lines += [".. rubric:: :doc:`Other types <types>`", "", "What some of the public names return or take."]
    return "\n".join(lines) + "\n"


def _examples(names: dict[str, PublicName]) -> dict[str, str]:
    """Return the program of docs/api_examples.md for each name, with all imports that it needs.

    Raises:
        SystemExit: a class has none, or a name is unknown.
    """
    text = (_DOCS / "api_examples.md").read_text(encoding="utf-8")
    lines = {match[1]: match[0] for match in _IMPORT.finditer(text)}
    found = {}
    for listed, code in _EXAMPLE.findall(text):
        body = _IMPORT.sub("", code).strip()
        program = _TEXT.sub("", body)
        used = [line for name, line in lines.items() if re.search(rf"\b{name}\b", program)]
        whole = "\n".join([*sorted(used, key=lambda line: (line.startswith("from"), line)), "", body])
        found.update({f"stepmill.{name}": whole for name in listed.split(", ")})
    shown = {path for page in PAGES for path in _paths(page, names)} - _ALIASES - _WITHOUT_EXAMPLE
    classes = {path for path in shown if isinstance(names[path].definition, griffe.Class)}
    if wrong := sorted((classes - found.keys()) | (found.keys() - names.keys())):
        raise SystemExit(
            f"docs/api_examples.md needs an example of each public class, and no other: {', '.join(wrong)}"
        )
    return found


def _title(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n"


def _paths(page: Page, names: dict[str, PublicName]) -> list[str]:
    own = [f"stepmill.{name}" for name in page.names]
    return [*own, *(path for path, name in names.items() if name.module in page.modules)]


def _page(page: Page, names: dict[str, PublicName], examples: dict[str, str]) -> str:
    parts = [_title(page.title), page.intro, ""]
    for path in _paths(page, names):
        if path not in _ALIASES or names[path].module == "stepmill":
            parts += _directive(names[path], examples.get(path, ""))
    return "\n".join(parts) + "\n"


def _directive(name: PublicName, example: str) -> list[str]:
    found = name.definition
    code = [f"      {line}" for line in example.splitlines()]
    shown = ["   .. rubric:: Example", "", "   .. code-block:: python", "", *code, ""] if code else []
    if isinstance(found, griffe.Class):
        if options := _options(found.name):
            return [f".. autoclass:: {name.path}(**options)", "   :members:", "", *shown, *options]
        bases = ["   :show-inheritance:"] * bool(found.bases)
        if name.path in _INHERITED:
            signature, text = _INHERITED[name.path]
            shown += [f"   .. py:method:: {signature}", "", f"      {text}", ""]
        return [f".. autoclass:: {name.path}", "   :members:", *bases, "", *shown]
    if isinstance(found, griffe.Function):
        return [f".. autofunction:: {name.path}", "", *shown]
    if not isinstance(found, griffe.Attribute):
        return []
    return [f".. py:data:: {name.path}", "", f"   ``{found.value}``", ""]


def _options(class_name: str) -> list[str]:
    """Return an entry for each option of a record: autodoc adds type and default, and the tables in docs/ have the rest."""
    kinds: tuple[type[Record], ...] = (PoolOptions, *RECORDS)
    kind = next((each for each in kinds if each.__name__ == class_name), None)
    if kind is None:
        return []
    texts = {
        f"{prefix}{name}": (_as_rst(values, page), _as_rst(meaning, page))
        for page, prefix in _OPTION_TABLES.items()
        for name, values, meaning in _OPTION_ROW.findall((_DOCS / f"{page}.md").read_text(encoding="utf-8"))
    }
    for each in RECORDS:
        values = f"a :py:class:`~stepmill.{each.__name__}`, or a mapping of its fields"
        texts[each._option] = values, texts.get(each._option, ("", (each.__doc__ or "").partition("\n")[0]))[1]
    lines = []
    for name in kind.__dataclass_fields__:
        path = kind._path(name)
        if path not in texts:
            raise SystemExit(
                f"no table of {', '.join(f'docs/{page}.md' for page in _OPTION_TABLES)} has a row for the option `{path}`"
            )
        values, meaning = texts[path]
        default = default_of(kind, name)
        options = ["      :no-value:"] if isinstance(default, Record) else []
        lines += [f"   .. autoattribute:: stepmill.{class_name}.{name}", *options, "", f"      {meaning}", ""]
        lines += [f"      Allowed values: {values}.{' Default: ``{}``.' * (default == {})}", ""]
    return lines


def _as_rst(text: str, page: str) -> str:
    """Return a line of Markdown as reStructuredText."""

    def link(match: re.Match[str]) -> str:
        return f"`{match[1]} <../{match[2] or page}.html{match[3] or ''}>`__"

    return _MARKDOWN_LINK.sub(link, re.sub(r"`([^`]+)`", r"``\1``", text))
