"""The website builds without a warning, loads nothing from elsewhere, and all of its pages and links are there."""

import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
pytestmark = pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="a source distribution has no results")
LOADS = ("script", "img", "iframe", "object", "embed", "source", "video", "audio", "link")


class Parsed(HTMLParser):
    """What a page contains: names to link to, links in its text, and what a browser loads with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.article: list[str] = []
        self.loaded: list[str] = []
        self.formulas = 0
        self.inside = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.inside |= tag == "article"
        self.formulas += tag == "math"
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
            self.article += [given["href"]] if self.inside else []
        if tag in LOADS:
            self.loaded += [given[name] for name in ("src", "href", "data") if name in given]

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parsed]:
    """The pages of the website, by their path on it."""
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for path in folder.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", path.read_text(encoding="utf-8")), path
    (folder / "404.html").unlink()  # served at any address, so its links begin at the root
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    pages = {name: Parsed(path) for name, path in files.items() if name.endswith(".html")}
    return {**{name: Parsed(Path(os.devnull)) for name in files}, **pages}


def page_of(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    name = name.removesuffix(".md")
    return f"{name.removesuffix('README')}index.html" if path.name == "README.md" else f"{name}.html"


def targets(page: str, links: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the file and the heading that each link within the website leads to."""
    for link in links:
        parts = urlsplit(link)
        if not parts.scheme:
            path = posixpath.join(posixpath.dirname(page), unquote(parts.path)) if parts.path else page
            yield posixpath.normpath(path), parts.fragment


def test_every_page_of_the_repository_is_there(site: dict[str, Parsed]) -> None:
    wanted = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md"), *(ROOT / "results").rglob("*.md")]
    wanted += DOCS.rglob("*.ipynb")
    assert not {page_of(path) for path in wanted} - site.keys()


def test_links_resolve(site: dict[str, Parsed]) -> None:
    for name, page in site.items():
        for target, heading in targets(name, page.links):
            assert target in site, (name, target)
            assert not heading or heading == "__skip" or heading in site[target].ids, (name, target, heading)


def test_nothing_is_loaded_from_elsewhere(site: dict[str, Parsed]) -> None:
    for name, page in site.items():
        assert not [link for link in page.loaded if urlsplit(link).scheme not in ("", "data")], name
        assert all(target in site for target, _ in targets(name, page.loaded)), name


def test_every_page_can_be_reached_by_links_in_the_text(site: dict[str, Parsed]) -> None:
    """From the list of all documentation, and from the front page."""
    for start, wanted in (("docs/index.html", "docs/"), ("index.html", "")):
        found, waiting = set[str](), [start]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += [target for target, _ in targets(name, site[name].article)]
        pages = {name for name in site if name.endswith(".html") and name.startswith(wanted)}
        assert not pages - found


def test_formulas_are_formulas(site: dict[str, Parsed]) -> None:
    for path in DOCS.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n.*?^```$", text, re.DOTALL | re.MULTILINE)
        text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
        formulas = blocks.count("math") + len(re.findall(r"(?<!\\)\$[^$]+\$", text))
        assert site[page_of(path)].formulas == formulas, path
