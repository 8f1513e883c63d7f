"""Write the address of the repository into a checkout: `release_links.py https://github.com/owner/name v0.2.0`.

The workflows that build a release run it, so that no file names an address, and a fork's archives lead to the fork. pyproject.toml
gets [project.urls], CITATION.cff gets repository-code, and the links of README.md to files become addresses, because PyPI shows the
README without the files.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#:]+)(?P<anchor>#[^)]*)?\)")


def write_links(address: str, tag: str, root: Path = ROOT) -> None:
    """Change the three files below `root`. `address` has no slash at its end; `tag` is a tag or a branch."""
    project, citation, readme = (root / name for name in ("pyproject.toml", "CITATION.cff", "README.md"))
    urls = {
        "Homepage": address,
        "Documentation": f"{address}/blob/{tag}/docs/index.md",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    project.write_text(f"{project.read_text(encoding='utf-8')}\n[project.urls]\n{lines}", encoding="utf-8")
    citation.write_text(f"{citation.read_text(encoding='utf-8')}repository-code: {address}\n", encoding="utf-8")

    def absolute(link: re.Match[str]) -> str:
        view = "raw" if link["image"] else "tree" if link["target"].endswith("/") else "blob"
        return f"{link['image']}[{link['text']}]({address}/{view}/{tag}/{link['target']}{link['anchor'] or ''})"

    readme.write_text(_LINK.sub(absolute, readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write_links(sys.argv[1], sys.argv[2])
