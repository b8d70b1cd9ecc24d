"""Hooks of mkdocs: the website is made of this repository's pages as they are, in their own folders.

So every relative link works on the website as it does in the repository. Pages are README, CHANGELOG, all of ``docs/``
and whatever they link to: results, notebooks, and source files, which become pages with their text. The navigation
follows ``docs/index.md``: its headings are the tabs, the pages that its tables link to are the entries.

A few things are written differently for Python-Markdown than for GitHub; the hooks below translate them.
"""

import html
import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

sys.path.append(str(Path(__file__).parent))  # mkdocs loads this file alone
import notebooks

ROOT = Path(__file__).parents[1]
INDEX = "docs/index.md"
STARTS = ("README.md", INDEX, "CHANGELOG.md")
SOURCES = {".py": "python", ".toml": "toml", ".cff": "yaml", "": "text"}
NOTEBOOK = ".ipynb"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"<!--(?:=.*?|/)-->")
API = re.compile(r"<!-- (::: .+?) -->.*?<!-- / -->", re.DOTALL)
MATH = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return a page with everything changed but its code."""
    return "".join(part if n % 2 else change(part) for n, part in enumerate(CODE.split(text)))


def links(name: str) -> Iterator[str]:
    """Yield the files and folders of the repository that a page links to, by their path from its root."""
    folder = name if (ROOT / name).is_dir() else posixpath.dirname(name)
    for link in LINK.finditer(CODE.sub("code", text_of(name))):
        yield posixpath.normpath(posixpath.join(folder, link[1]))


def text_of(name: str) -> str:
    """Return the Markdown of a page, as it is in the repository; that of a folder or a notebook is made."""
    path = ROOT / name
    if path.is_dir():
        return listing(path)
    if path.suffix == NOTEBOOK:
        return notebooks.markdown(path)
    return path.read_text(encoding="utf-8")


def listing(folder: Path) -> str:
    """Return a page that lists the files of a folder with the first line of what they say about themselves."""
    rows = [f"# {folder.relative_to(ROOT).as_posix()}\n\n| file | |\n| --- | --- |"]
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != "__init__.py":
            says = (
                re.match(r'"""(.+?)("""|$)', path.read_text(encoding="utf-8"), re.M) if path.suffix == ".py" else None
            )
            rows.append(f"| [{path.name}]({path.name}) | {says[1] if says else ''} |")
    return "\n".join(rows) + "\n"


def source(name: str) -> str:
    """Return a page that shows a source file."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return f"# {name}\n\n~~~~{SOURCES[Path(name).suffix]}\n{text}~~~~\n"


def page_of(name: str) -> str:
    """Return where the website has a file or a folder: itself, or the page that is made of it."""
    if (ROOT / name).is_dir():
        return f"{name}/README.md"
    return f"{name}.md" if Path(name).suffix in (*SOURCES, NOTEBOOK) else name


def collected() -> dict[str, str]:
    """Return what the website has, by the names in the repository: all that can be reached from the first pages."""
    found: dict[str, str] = {}
    waiting = list(STARTS)
    while waiting:
        name = waiting.pop()
        if name not in found and (ROOT / name).exists():
            found[name] = page_of(name)
            if name.endswith((".md", NOTEBOOK)) or (ROOT / name).is_dir():
                waiting.extend(links(name))
    return found


def navigation() -> list[dict[str, Any]]:
    """Return the tabs: README, the sections of the index, and the studies."""
    tabs: list[dict[str, Any]] = [{"tdpfed": "README.md"}]
    for part in re.split(r"^## ", text_of(INDEX), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        rows = re.findall(r"^\| \[(.+?)\]\(([^)]+)\)", text, re.MULTILINE)
        tabs.append({heading: [{title: page_of(posixpath.normpath(f"docs/{link}"))} for title, link in rows]})
    tabs[1] = {name: [INDEX, *pages] for name, pages in tabs[1].items()}
    studies = [page for page in links("results/README.md") if re.fullmatch(r"results/[\w-]+/README\.md", page)]
    named = [{page.split("/")[1]: page} for page in dict.fromkeys(studies)]
    return [*tabs, {"Results": ["results/README.md", *named]}]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation."""
    config.nav = navigation()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the repository's pages in the place of those of ``docs/`` alone."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    listed = str(config.nav)
    for name, uri in collected().items():
        path = ROOT / name
        level = InclusionLevel.INCLUDED if f"'{uri}'" in listed else InclusionLevel.NOT_IN_NAV
        if uri == name:
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls, inclusion=level))
        else:
            text = source(name) if path.suffix in SOURCES and path.is_file() else text_of(name)
            files.append(File.generated(config, uri, content=text, inclusion=level))
    files.append(File("docs/website.css", str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Translate what GitHub's Markdown has and Python-Markdown does not, and lead links to the pages made here."""
    folder = posixpath.dirname(page.file.src_uri)

    def lead(link: re.Match[str]) -> str:
        name = posixpath.normpath(posixpath.join(folder, link[1]))
        return posixpath.relpath(page_of(name), folder or ".") + (link[2] or "")

    def change(text: str) -> str:
        return LINK.sub(lead, FIGURE.sub("", text)).replace("\\<", "&lt;")

    markdown = outside_code(API.sub(r"\1", markdown), change)
    return re.sub(
        r"^\|.*$", lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown, flags=re.M
    )


def on_page_content(content: str, *, page: Page, **_: Any) -> str:
    """Write formulas as MathML, which browsers show without any script."""

    def mathml(found: re.Match[str]) -> str:
        try:
            display = "block" if found[2] == "[" else "inline"
            return latex2mathml.converter.convert(html.unescape(found[3]).strip(), display=display)
        except Exception as error:
            raise PluginError(f"{page.file.src_uri}: {found[3]!r} is no formula: {error}") from error

    content = re.sub(r":(?:func|class|meth|mod|attr|data):(?=<code>)", "", content)
    return MATH.sub(mathml, content)
