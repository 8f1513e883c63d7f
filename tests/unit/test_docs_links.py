"""Links of the documentation site: between its pages, and to other sites."""

from __future__ import annotations

from scripts.docs_links import broken_links, external_links


def test_a_link_to_a_page_or_an_anchor_that_is_not_there_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#here">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>')
    (tmp_path / "b.html").write_text('<p id="here">')
    assert broken_links(tmp_path) == ["a.html: b.html#gone has no such anchor", "a.html: c.html does not exist"]


def test_pages_of_other_sites_are_listed_once(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="https://x.org/p#1">1</a><a href="https://x.org/p#2">2</a><a href="b.html">3</a>'
    )
    assert external_links(tmp_path) == ["https://x.org/p"]
