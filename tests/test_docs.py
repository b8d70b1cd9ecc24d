"""README and docs: links resolve, code runs, commands and keys exist, generated pages are current."""

import importlib.util
import pkgutil
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import typer
from typer.testing import CliRunner

import page_methods
from tdpfed import engine, wire
from tdpfed.algorithms import ALGORITHMS
from tdpfed.cli import app
from tdpfed.config.keys import describe
from tdpfed.config.loading import load_config, parse_config, presets
from tdpfed.data import available
from tdpfed.data.sources import SOURCES
from tdpfed.errors import TDPFedError
from tdpfed.models import MODELS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
DEVELOPERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
EVERY_PAGE = [*PAGES, *DEVELOPERS]
KEYS = {name: {key.name: key.default for key in describe(name)} for name in ALGORITHMS}
needs_results = pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="a source distribution has no results")
SECTIONS = {key.partition(".")[0] for key in KEYS["tdpfed"]}


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def names(paths: list[Path]) -> list[Any]:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(path), re.DOTALL | re.MULTILINE)


def prose(path: Path) -> str:
    """Return a page without its code blocks and comments."""
    return re.sub(r"^```.*?^```|<!--.*?-->", "", text_of(path), flags=re.DOTALL | re.MULTILINE)


# -- links -------------------------------------------------------------------------------------------------------------


def links(markdown: str) -> list[str]:
    plain = re.sub(r"`[^`\n]*`", "code", markdown)
    return re.findall(r"\]\(([^)\s]+)\)", plain) + re.findall(r"(?:src|href|srcset)=\"([^\"\s]+)\"", plain)


def anchors(markdown: str) -> set[str]:
    """Return the names under which GitHub finds the headings of a page."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", markdown, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        again = sum(one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in found)
        found.append(f"{slug}-{again}" if again else slug)
    return set(found)


def broken(page: Path) -> Iterator[str]:
    for link in links(prose(page)):
        parts = urlsplit(link)
        if parts.scheme:
            if parts.scheme != "https" or "." not in parts.netloc:
                yield f"{link}: no https address"
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if not target.is_relative_to(ROOT) or not target.exists():
            yield f"{link}: no such file"
        elif parts.fragment and parts.fragment not in anchors(prose(target)):
            yield f"{link}: no such heading"


@needs_results
@pytest.mark.parametrize("page", names([*EVERY_PAGE, *sorted((ROOT / "results").rglob("*.md"))]))
def test_links_resolve(page: Path) -> None:
    assert not list(broken(page))


@pytest.mark.parametrize("page", names(EVERY_PAGE))
def test_files_of_the_repository_that_a_page_mentions_exist(page: Path) -> None:
    named = re.findall(r"(?<![\w./-])(?:src|tests|docs|benchmarks|examples)/[\w./-]*\w", text_of(page))
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_check_of_links_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "a.md").write_text(
        "# One, two\n# One, two\n[x](a.md#one-two-1) [y](a.md#three) [z](b.md) [h](http://x.y)"
    )
    assert [line.partition(":")[0] for line in broken(tmp_path / "a.md")] == ["a.md#three", "b.md", "http"]


def test_every_page_is_listed_in_the_index() -> None:
    listed = {(DOCS / link).resolve() for link in links(prose(DOCS / "index.md"))}
    methods = (DOCS / "algorithms" / f"{name}.md" for name in ALGORITHMS)
    wanted = {*PAGES[1:], *methods, *ROOT.glob("examples/*.py"), *DEVELOPERS}
    assert listed == wanted - {DOCS / "index.md"}, "docs/index.md lists every page; the website's menu is made from it"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_page_of_a_method_is_headed_by_its_name(name: str) -> None:
    assert text_of(DOCS / "algorithms" / f"{name}.md").startswith(f"# {ALGORITHMS[name].title}\n")


# -- code --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", names([page for page in PAGES[1:] if blocks(page, "python")]))
def test_python_blocks_run_one_after_another(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block that begins with a file's name is that file, too; configurations of the page find it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    space: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            Path(name[1]).write_text(block, encoding="utf-8")
        exec(compile(block, str(page), "exec"), space)
    for line in commands(page):
        if line[1:2] in (["run"], ["plan"]) and any("my_models" in word for word in line):
            done = CliRunner().invoke(app, [*line[1:], *(["--set", "run.rounds=1"] if line[1] == "run" else [])])
            assert done.exit_code == 0, (line, done.output, done.exception)
    sys.modules.pop("my_models", None)


def commands(page: Path) -> list[list[str]]:
    """Return the command lines of a page's shell blocks that call the package."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))[:1] == ["tdpfed"]]


@pytest.mark.parametrize("page", names([page for page in PAGES if commands(page)]))
def test_shell_blocks_call_commands_with_options_and_keys_there_are(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_methods.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    check_commands(page)


def check_commands(page: Path) -> None:
    """Refuse commands, options, methods and keys that there are not."""
    for line in commands(page):
        done = CliRunner().invoke(app, [*line[1:], "--help"])
        assert done.exit_code == 0, (line, done.output)
        given = dict(pairwise(line))
        preset = next((word for word in line[2:] if word in presets()), "digits")
        methods = given.get("--algorithms", "").split(",") if "--algorithms" in given else [None]
        settings = [line[n + 1] for n, word in enumerate(line) if word == "--set"]
        for name in methods:
            load_config(preset, settings if name is None else [*settings, f"algorithm.name={name}"])
        for sweep in (line[n + 1] for n, word in enumerate(line) if word == "--sweep"):
            key, _, values = sweep.partition("=")
            owners = [name for name in methods if key in KEYS[name or "tdpfed"]]
            assert owners, line
            for name in owners:
                for value in values.split(","):
                    load_config(preset, [f"algorithm.name={name or 'tdpfed'}", f"{key}={value}"])


def test_the_check_of_commands_sees(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for line in ("run --nothing", "nothing", "run --set run.nothing=1", "compare --sweep run.nothing=1,2"):
        page.write_text(f"```sh\ntdpfed {line}\n```\n", encoding="utf-8")
        with pytest.raises((AssertionError, TDPFedError)):
            check_commands(page)


@pytest.mark.parametrize("page", names([page for page in PAGES if blocks(page, "toml")]))
def test_toml_blocks_are_configurations(page: Path) -> None:
    for block in blocks(page, "toml"):
        parse_config(tomllib.loads(block))


@pytest.mark.parametrize("page", names(PAGES))
def test_keys_in_the_text_exist(page: Path) -> None:
    known = set().union(*KEYS.values(), {f"wire.{name}" for name in wire.__all__})  # modules of these names, too
    known |= {f"engine.{module.name}" for module in pkgutil.iter_modules(engine.__path__)}
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        key, _, _ = (part.strip() for part in code.partition("="))
        if not key.endswith((".py", ".pem", ".key")) and re.fullmatch(rf"({'|'.join(SECTIONS)})\.\w+(\.\w+)?", key):
            assert ".".join(key.split(".")[:2]) in known, code


# -- generated pages, and what pages list ------------------------------------------------------------------------------


def generator(root: Path = ROOT) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", root / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_results
def test_generated_pages_are_current() -> None:
    assert generator().main(["--check"]) == 0, "run: python docs/generate.py"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the pages and of the files that their numbers come from."""
    shutil.copy(ROOT / "README.md", tmp_path)
    for folder in ("docs", "results", "benchmarks/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


@needs_results
def test_the_generator_sees_a_reference_that_is_old_and_writes_once(copy: Path) -> None:
    (copy / "docs/configuration.md").write_text("# By hand\n", encoding="utf-8")
    made = generator(copy)
    assert [made.main(["--check"]), made.main([]), made.main(["--check"])] == [1, 0, 0]
    assert text_of(copy / "docs/configuration.md").startswith("# By hand\n")


@needs_results
def test_the_generator_sees_a_number_that_was_edited(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = generator(copy)
    for name in ("README.md", "docs/paper.md", "results/README.md"):
        page = copy / name
        text = text_of(page)
        number = re.search(r"(?<=-->)[\d.]+(?=<!--/-->)", text)
        assert number is not None
        page.write_text(text[: number.start()] + "12.34" + text[number.end() :], encoding="utf-8")
        assert made.main(["--check"]) == 1
        assert capsys.readouterr().out == f"{name}: out of date\n"
        assert made.main([]) == 0
        assert capsys.readouterr().out == f"{name}: written\n"
        assert text_of(page) == text


@needs_results
def test_the_generator_sees_a_result_that_changed(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "benchmarks/results/flower.json"
    file.write_text(re.sub(r'("rounds_per_minute": )[\d.]+', r"\g<1>1.5", text_of(file)), encoding="utf-8")
    assert generator(copy).main(["--check"]) == 1
    assert capsys.readouterr().out == "docs/deployment.md: out of date\n"


@needs_results
def test_the_generator_refuses_an_unknown_key(copy: Path) -> None:
    with (copy / "README.md").open("a", encoding="utf-8") as page:
        page.write("\nIt has <!--=mnist/nothing/ours-->99.9<!--/--> %.\n")
    with pytest.raises(SystemExit, match="mnist/nothing/ours"):
        generator(copy).main(["--check"])


def tables(markdown: str, heading: str) -> dict[str, list[str]]:
    """Return the rows below a heading up to the next, by their first cell."""
    part = markdown.partition(f"\n{heading}\n")[2]
    rows = [line.strip("| ").split(" | ") for line in re.split(r"^#", part, flags=re.MULTILINE)[0].splitlines()]
    return {row[0].strip("`"): row[1:] for row in rows if re.match("`[^`]", row[0])}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_key_is_in_the_reference_with_its_default(algorithm: str) -> None:
    page = text_of(DOCS / "configuration.md")
    found = tables(page, f"### {algorithm}")
    for section in SECTIONS:
        found |= tables(page, f"## {section}")
    assert set(found) == set(KEYS[algorithm])
    for key, (allowed, default, meaning) in found.items():
        assert allowed, key
        assert meaning, key
        value = KEYS[algorithm][key]
        if key != "algorithm.name":
            assert (default == "not set") == (value is None), key


def test_functions_of_the_paper_s_equations_exist() -> None:
    part = text_of(DOCS / "paper.md").partition("\n## From equation to function\n")[2].partition("\n## ")[0]
    cells = " ".join(row.split(" | ")[1] for row in part.splitlines() if row.startswith("| "))
    named = [name for name in re.findall(r"`([\w.]+)`", cells) if name.partition(".")[0] not in SECTIONS - {"engine"}]
    assert len(named) > 10
    for name in named:
        pkgutil.resolve_name(f"tdpfed.{name}")


def test_every_package_is_in_the_table_of_contributing() -> None:
    rows = re.findall(r"^\| (`.*?) \|", text_of(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", row)]
    there = [path for path in (ROOT / "src/tdpfed").iterdir() if path.suffix in ("", ".py")]
    assert sorted(listed) == sorted(path.stem for path in there if not path.name.startswith("_"))


def test_every_command_and_option_is_in_the_reference() -> None:
    page = text_of(DOCS / "command-line.md")

    def check(command: Any, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            check(inner, f"{path} {name}")
        if not hasattr(command, "commands"):
            options = {name.split()[0] for name in tables(page, f"## {path}")}
            assert {opt for one in command.params for opt in one.opts if opt.startswith("--")} <= options, path

    check(typer.main.get_command(app), "tdpfed")


def test_what_pages_list_is_what_there_is() -> None:
    start, own = text_of(DOCS / "getting-started.md"), text_of(DOCS / "own-model-and-data.md")
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    missing = [name for name in presets() if f"`{name}`" not in start]
    missing += [name for name in project["optional-dependencies"] if f"`{name}`" not in start]
    missing += [name for name in available() if f"`{name}`" not in start]
    missing += [name for name in MODELS if f"`{name}`" not in own]
    for data_set, files in SOURCES.items():
        row = tables(start, "## Without a network")[data_set]
        missing += [one.folders[0] for one in files if f"`{one.folders[0]}`" not in row[0]]
    missing += [one.file for group in SOURCES.values() for one in group if f"`{one.file}`" not in start]
    assert not missing
