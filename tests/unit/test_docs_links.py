"""Links of the documentation site: between its pages, and to other sites."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from scripts.docs_links import broken_links, dead_links, external_links


class Handler(BaseHTTPRequestHandler):
    """Answers with the status that the path names."""

    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_link_to_a_page_or_an_anchor_that_is_not_there_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#here">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>')
    (tmp_path / "b.html").write_text('<p id="here">')
    assert broken_links(tmp_path) == ["a.html: b.html#gone has no such anchor", "a.html: c.html does not exist"]


def test_pages_of_other_sites_are_listed_once(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="https://x.org/p#1">1</a><a href="https://x.org/p#2">2</a><a href="b.html">3</a>'
    )
    assert external_links(tmp_path) == ["https://x.org/p"]


def test_a_page_that_is_gone_and_a_site_that_does_not_answer_are_found(site):
    nowhere = "http://127.0.0.1:1/200"
    found = dead_links([f"{site}/200", f"{site}/404", f"{site}/403", nowhere])
    assert found[0] == f"{site}/404: status 404"
    assert found[1].startswith(nowhere)
    assert len(found) == 2
