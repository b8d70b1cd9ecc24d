"""The page in a real browser: drawn, switched, sorted, followed, at any width and in the dark, silent and offline.

A few tests run with all others, the rest with ``-m slow``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser, chromium

import folders
from tdpfed.engine.attacks import attackers
from tdpfed.report import Report, read_run, write_page
from tdpfed.report.table import cost_to, results
from tdpfed.runs.folder import RunFolder

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium")

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script><b>\"&'"
LINES = "#curves .chart:nth-of-type(1) .scatterlayer path.js-line"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def chrome(root: Path) -> Iterator[Browser]:
    (root / "profile").mkdir()
    with browser(root / "profile") as started:
        yield started


@pytest.fixture(scope="module")
def report(root: Path) -> Report:
    """Three methods of two seeds, one of which uploads nothing."""
    paths = [folders.make(root / f"tdpfed-{s}", seed=s, level=0.9 + 0.04 * s, rounds=40) for s in (0, 1)]
    for name, level, up in (("fedavg", 0.8, 600_000), ("local", 0.85, 0)):
        where = [root / f"{name}-{s}" for s in (0, 1)]
        paths += [
            folders.make(path, f"algorithm.name={name}", seed=s, level=level + 0.06 * s, up=up, rounds=40)
            for s, path in enumerate(where)
        ]
    return write_page(paths, root / "page.html")


@pytest.fixture
def page(chrome: Browser, report: Report) -> Iterator[Browser]:
    """The page, opened on a desk in daylight; whatever a test does to it, it stays silent and offline."""
    chrome.size(1280, 900)
    chrome.prefer("light")
    chrome.open(report.page)
    yield chrome
    quiet(chrome)


def quiet(page: Browser) -> None:
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def click(page: Browser, selector: str) -> None:
    page.do(f"document.querySelector({json.dumps(selector)}).click()")


def texts(page: Browser, selector: str) -> list[str]:
    found: list[str] = page.do(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")
    return found


def lines(page: Browser, chart: int = 0) -> list[str]:
    """The outlines of the curves of a chart, as SVG path data; bands have no stroke and are not among them."""
    script = f"""[...document.querySelectorAll('#curves .chart')[{chart}].querySelectorAll('path.js-line')]
      .filter((path) => parseFloat(getComputedStyle(path).strokeWidth) > 0).map((path) => path.getAttribute('d'))"""
    found: list[str] = page.do(script)
    return found


def axis(page: Browser) -> str:
    title: str = page.do("document.querySelector('#curves .chart .xtitle').textContent")
    return title


def methods(page: Browser) -> list[str]:
    return texts(page, "#table tbody tr[data-group] .name")


def test_the_curves_are_drawn(page: Browser) -> None:
    for chart in (0, 1):
        drawn = lines(page, chart)
        assert len(drawn) == 3
        assert all(outline.count("L") + outline.count("H") + outline.count("V") > 8 for outline in drawn)
    inside = page.do("""[...document.querySelectorAll('#curves .grid .chart')].every((chart) => {
      const plot = chart.querySelector('.nsewdrag').getBoundingClientRect();
      return plot.width > 300 && plot.height > 150 && [...chart.querySelectorAll('path.js-line')].every((path) => {
        const box = path.getBoundingClientRect();
        const within = box.left >= plot.left - 2 && box.right <= plot.right + 2;
        return within && box.width > 0.5 * plot.width && box.height > 20;
      });
    })""")
    assert inside
    assert page.do("document.querySelectorAll('#clients .boxlayer path.box').length") == 3
    quiet(page)
    assert len(page.requests) == 1 + sum(url.startswith("data:") for url in page.requests)


def test_the_x_axis_switches(page: Browser) -> None:
    titles, outlines = [axis(page)], [lines(page)]
    for value in ("mb", "seconds"):
        click(page, f"input[name=x][value={value}]")
        titles.append(axis(page))
        outlines.append(lines(page))
    assert titles == ["communication round", "uploaded megabytes, all clients together", "seconds"]
    assert outlines[0] != outlines[1] != outlines[2]
    ticks = [float(text) for text in texts(page, "#curves .chart .xtick text") if text in ("0", "5", "10")]
    assert max(ticks) == 10  # 40 rounds of a quarter of a second


@pytest.mark.slow
def test_the_x_axis_switches_by_keyboard(page: Browser) -> None:
    page.do("document.querySelector('input[name=x]:checked').focus()")
    page.press("ArrowRight")
    assert axis(page).startswith("uploaded megabytes")
    assert page.do("document.activeElement.value") == "mb"


@pytest.mark.slow
def test_what_uploads_nothing_is_a_level_over_megabytes(page: Browser) -> None:
    click(page, "input[name=x][value=mb]")
    level = next(outline for outline in lines(page) if outline.count("L") + outline.count("H") == 1)
    assert level
    assert "Local: uploads nothing" in page.do("document.querySelector('#curves > .hint').textContent")


@pytest.mark.slow
def test_accuracy_and_loss_are_selectable(page: Browser) -> None:
    before = [lines(page, 0), lines(page, 1)]
    click(page, "input[name=accuracy][value=global_accuracy]")
    click(page, "input[name=loss][value=global_loss]")
    assert texts(page, "#curves .ytitle") == ["global accuracy, %", "held-out loss, global", "global accuracy, %"]
    assert lines(page, 0) != before[0]
    assert lines(page, 1) != before[1]


@pytest.mark.slow
def test_single_runs_are_reachable(page: Browser) -> None:
    click(page, "input[name=view][value=single]")
    assert len(lines(page)) == 6
    click(page, "#table .more")
    assert len(texts(page, "#table tr.single")) == 2
    assert page.do("document.activeElement.getAttribute('aria-expanded')") == "true"


@pytest.mark.slow
def test_a_method_is_hidden_by_its_key(page: Browser) -> None:
    click(page, ".legend button")
    assert len(lines(page)) == 2
    assert page.do("document.querySelector('.legend button').getAttribute('aria-pressed')") == "false"


def test_the_table_holds_the_figures_of_the_report(page: Browser, report: Report) -> None:
    made = results(report.groups)
    rows = {str(row[1]): [str(cell) for cell in row] for row in made.rows}
    marks = {str(row[1]): [getattr(cell, "mark", "") for cell in row] for row in made.rows}
    shown: list[list[tuple[str, str]]] = page.do("""[...document.querySelectorAll('#table tr[data-group]')]
      .map((row) => [...row.children].map((cell) => [cell.textContent, cell.className]))""")
    titles = texts(page, "#table thead th")
    assert len(shown) == 3
    for name, cells in zip(methods(page), shown, strict=True):
        for title, (text, mark) in list(zip(titles, cells, strict=True))[1:]:
            at = made.titles.index(title)
            assert (text.removeprefix("≈ "), mark) == (rows[name][at], marks[name][at])
            assert text.startswith("≈ ") == (mark == "close")
    assert {mark for cells in marks.values() for mark in cells} == {"", "best", "close"}
    to_target = made.titles.index("rounds to target")
    assert any(cells[to_target] == "best" for cells in marks.values())


@pytest.mark.slow
def test_the_cost_to_a_target_is_that_of_the_package(page: Browser, report: Report) -> None:
    page.do(
        "const goal = document.querySelector('#target'); goal.value = '70'; goal.dispatchEvent(new Event('change'))"
    )
    at = texts(page, "#table thead th").index("rounds to target")
    for group in report.groups:
        index = [other.label for other in report.groups].index(group.label)
        text = page.do(f"document.querySelector('tr[data-group=\"{index}\"]').children[{at}].textContent")
        rounds = [cost_to(run, 0.7)[0] or 0 for run in group.runs]
        assert float(text.removeprefix("≈ ").partition(" ±")[0]) == pytest.approx(sum(rounds) / len(rounds), abs=0.051)


@pytest.mark.slow
def test_the_table_sorts_by_click_and_by_key(page: Browser) -> None:
    assert methods(page) == ["TDPFed", "Local", "FedAvg"]
    head = "#table thead th:nth-child({}) button"
    click(page, head.format(1))
    assert methods(page) == ["FedAvg", "Local", "TDPFed"]
    page.press("Enter")  # the button kept the focus
    assert methods(page) == ["TDPFed", "Local", "FedAvg"]
    assert texts(page, "#table th[aria-sort=descending]") == ["method"]
    up = texts(page, "#table thead th").index("up MB") + 1
    click(page, head.format(up))
    assert methods(page) == ["FedAvg", "TDPFed", "Local"]
    click(page, head.format(up))
    assert methods(page) == ["Local", "TDPFed", "FedAvg"]


@pytest.mark.slow
def test_every_control_is_reached_by_tab_and_shows_it(page: Browser) -> None:
    reached: list[str] = []
    for _ in range(60):
        page.press("Tab")
        name, outline = page.do("""(() => {
          const now = document.activeElement, seen = now.matches('.seg input') ? now.nextElementSibling : now;
          if (now === document.body) return [null, 0];
          return [now.id || now.name || now.textContent, parseFloat(getComputedStyle(seen).outlineWidth)];
        })()""")
        if name is None:
            break
        assert outline >= 2, name
        reached.append(name)
    for wanted in ("theme", "target", "accuracy", "loss", "x", "view", "TDPFed", "FedAvg", "personalized %"):
        assert wanted in reached


@pytest.mark.slow
def test_choices_survive_a_reload(page: Browser) -> None:
    for selector in ("input[name=x][value=seconds]", "input[name=view][value=single]", ".legend button", "#theme"):
        click(page, selector)
    click(page, "#table thead th button")
    order = methods(page)
    page.do("delete document.documentElement.dataset.ready; location.reload()")
    page.wait("document.documentElement?.dataset.ready === 'true'")
    assert (axis(page), methods(page), len(lines(page))) == ("seconds", order, 4)
    assert page.do("document.documentElement.dataset.theme") == "dark"


@pytest.mark.slow
def test_nonsense_in_the_address_is_passed_over(page: Browser, report: Report) -> None:
    page.open(report.page, "x=nothing&sort=99.7&data=12&target=x&hide=77&zoom=a,b_c&theme=pink&view=%3Cb%3E&open=-3")
    assert (axis(page), len(lines(page)), methods(page)[0]) == ("communication round", 3, "TDPFed")


OVERFLOW = """[...document.querySelectorAll('body *')].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width && !one.closest('.scroll, pre, .chart svg, .modebar') && box.right > innerWidth + 1;
}).map((one) => one.tagName + '.' + one.className)"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_is_wider_than_a_phone(page: Browser, report: Report, width: int) -> None:
    page.size(width, 800, mobile=True)
    page.open(report.page, "open=0.1.2&all=1")
    assert page.do("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert page.do(OVERFLOW) == []
    assert all(lines(page, chart) for chart in (0, 1))


def brightness(page: Browser, script: str) -> float:
    values: list[int] = page.do(f"({script}).match(/[0-9.]+/g).slice(0, 3).map(Number)")
    return sum(values) / 3


@pytest.mark.slow
def test_the_page_is_dark_where_the_reader_prefers_it(page: Browser, report: Report) -> None:
    ground, plot, ink = (
        "getComputedStyle(document.body).backgroundColor",
        "getComputedStyle(document.querySelector('#curves .chart .main-svg')).backgroundColor",
        "getComputedStyle(document.querySelector('#curves .chart .xtick text')).fill",
    )
    assert brightness(page, ground) > 240
    assert brightness(page, ink) < 80
    page.prefer("dark")
    page.open(report.page)
    assert brightness(page, ground) < 40
    assert brightness(page, plot) < 40
    assert brightness(page, ink) > 200
    click(page, "#theme")
    assert brightness(page, ground) > 240
    assert brightness(page, ink) < 80


@pytest.fixture(scope="module")
def crowd(root: Path) -> Report:
    """Six methods of three seeds, one of them at two settings, one that diverges, and one that uploads little."""
    methods = {
        "tdpfed": (0.92, 300_000), "pfedme": (0.94, 600_000), "lgfedavg": (0.95, 20_000), "scaffold": (0.1, 1_200_000),
        "local": (0.9, 0), "fedavg_sar": (0.93, 300_000),
    }  # fmt: skip
    paths = [
        folders.make(root / f"{name}{s}", f"algorithm.name={name}", seed=s, level=level + 0.01 * s, up=up)
        for name, (level, up) in methods.items()
        for s in range(3)
    ]
    paths += [folders.make(root / f"small{s}", "algorithm.compression=8", seed=s, level=0.75) for s in range(3)]
    for path in (path for path in paths if "scaffold" in path.name):
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        grown = [{**line, "minibatch_loss": 3.0 ** line["round"]} for line in lines]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in grown))
    return write_page(paths, root / "crowd.html")


@pytest.fixture
def crowded(chrome: Browser, crowd: Report) -> Iterator[Browser]:
    chrome.size(1280, 900)
    chrome.prefer("light")
    chrome.open(crowd.page)
    yield chrome
    quiet(chrome)


def test_a_results_table_fits_a_desk(crowded: Browser, crowd: Report) -> None:
    wide = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert crowded.do(wide) == 0
    crowded.open(crowd.page, "open=0.1.2.3.4.5.6")
    assert len(texts(crowded, "#table tr.single")) == 21
    assert crowded.do(wide) == 0


def test_a_method_has_one_color_and_the_name_that_people_write(crowded: Browser) -> None:
    colors = crowded.do("""[...document.querySelectorAll('#table tr[data-group]')].map((row) => [
      row.querySelector('.name').textContent.split(',')[0], row.querySelector('.key path').getAttribute('fill')])""")
    named = {name: {color for other, color in colors if other == name} for name, _ in colors}
    assert set(named) == {"TDPFed", "pFedMe", "LG-FedAvg", "SCAFFOLD", "Local", "FedAvg (s.a.r.)"}
    assert [len(found) for found in named.values()] == 6 * [1]
    assert len(set.union(*named.values())) == 6


def test_what_diverges_does_not_squash_the_other_curves(crowded: Browser) -> None:
    script = "document.querySelectorAll('#curves .chart')[{}].layout.yaxis.range"
    low, high = crowded.do(script.format(1))
    assert low < 0.1
    assert 1.5 < high < 2.5, "the others begin at 1.79"
    assert "SCAFFOLD (up to 3.49e+9)" in crowded.do("document.querySelector('#curves').textContent")
    final = crowded.do(script.format(2))
    assert 65 < final[0] < 75
    assert 90 < final[1] < 100
    assert crowded.do("document.querySelectorAll('#curves .chart')[2].data.length") == 7
    click(crowded, ".controls .check:nth-last-of-type(1) input")
    assert crowded.do(script.format(1))[1] > 3e9
    assert crowded.do(script.format(2))[0] < 15


@pytest.mark.slow
def test_megabytes_that_differ_more_than_tenfold_have_a_logarithmic_axis(crowded: Browser, report: Report) -> None:
    kinds = "[...document.querySelectorAll('#curves .chart')].map((one) => one.layout.xaxis.type)"
    assert crowded.do(kinds) == ["linear", "linear", "log"]
    click(crowded, "input[name=x][value=mb]")
    assert crowded.do(kinds) == ["log", "log", "log"]
    assert len(lines(crowded)) == 7
    crowded.open(report.page, "x=mb")
    assert crowded.do(kinds) == ["linear", "linear", "linear"]


@pytest.mark.slow
def test_the_points_of_the_last_chart_are_the_results(crowded: Browser, crowd: Report) -> None:
    click(crowded, ".controls .check:nth-last-of-type(1) input")
    points = crowded.do("document.querySelectorAll('#curves .chart')[2].data.map((one) => [one.name, one.x, one.y])")
    for group in crowd.groups:
        x, y = next((x, y) for name, x, y in points if name == group.label)
        assert y[0] == pytest.approx(100 * (group.stat("personalized_accuracy").mean or 0), rel=1e-4)
        assert x == pytest.approx([(group.stat("uplink_bytes").mean or 0) / 1e6]) or group.method == "Local"


def test_names_are_text_whatever_they_say(chrome: Browser, root: Path) -> None:
    path = folders.make(root / HOSTILE.replace("/", "_"), "robust.attack=alie", status=None)
    config = path / "config.toml"
    config.write_text(
        config.read_text()
        .replace('name = "digits"', f"name = {json.dumps(HOSTILE)}")
        .replace('"tdpfed"', json.dumps(HOSTILE))
    )
    reason = {"round": 1, "client": 1, "rule": HOSTILE, "tensor": HOSTILE, "reason": HOSTILE}
    (path / "refusals.jsonl").write_text(json.dumps(reason) + "\n")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**folders.record(21).as_dict(), "diagnostics": {HOSTILE: 1.0}}) + "\n")
    other = folders.make(root / "other", seed=1)
    chrome.open(write_page([path, other], root / "hostile.html").page)
    quiet(chrome)
    assert chrome.do("document.querySelectorAll('img, main script, b').length") == 0
    assert HOSTILE in chrome.do("document.title")
    assert sum(HOSTILE in text for text in texts(chrome, "td, th, li, h3, label")) > 3


@pytest.mark.slow
def test_panels_are_there_when_there_is_something_to_show(chrome: Browser, root: Path, report: Report) -> None:
    panels = "['plan', 'diagnostics', 'robust', 'privacy'].filter((id) => !document.getElementById(id).hidden)"
    chrome.open(report.page)
    assert chrome.do(panels) == ["plan"]
    assert texts(chrome, "#plan tbody tr:first-child > *") == ["fc1.weight", "100x64", "20", "6,400", "3,280", "1.95"]
    measured: dict[str, Any] = {"diagnostics": {"gradient_norm": 0.5, "drift": 3.0}, "rejected": 4}
    path = folders.make(root / "all", "robust.gauge=1.0", every=measured)
    (path / "refusals.jsonl").write_text('{"round": 1, "client": 5, "rule": "gauge", "reason": "too far"}\n')
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps({**one, "epsilon": one["round"] / 10}) + "\n" for one in metrics)
    )
    chrome.open(write_page([path]).page)
    quiet(chrome)
    assert chrome.do(panels) == ["plan", "diagnostics", "robust", "privacy"]
    for panel, charts in (("diagnostics", 2), ("robust", 1), ("privacy", 1)):
        assert chrome.do(f"document.querySelectorAll('#{panel} path.js-line').length") == charts
    assert "too far" in "".join(texts(chrome, "#robust td"))


@pytest.mark.slow
def test_data_sets_are_shown_one_at_a_time(chrome: Browser, root: Path) -> None:
    other = folders.make(root / "synthetic", "data.name=synthetic", "algorithm.name=pfedme")
    chrome.open(write_page([root / "tdpfed-0", other], root / "two.html").page)
    assert methods(chrome) == ["TDPFed"]
    assert "2 data sets" in chrome.do("document.querySelector('#notes').textContent")
    click(chrome, "input[name=data][value='1']")
    assert methods(chrome) == ["pFedMe"]
    assert len(lines(chrome)) == 1
    quiet(chrome)


@pytest.mark.slow
def test_a_page_of_twenty_runs_of_800_rounds_opens_at_once(chrome: Browser, root: Path) -> None:
    measured = {"diagnostics": {"gradient_norm": 0.5, "drift": 3.0}}
    paths = [
        folders.make(root / f"long{m}-{s}", f"algorithm.lam={m}.0", seed=s, rounds=800, every=measured)
        for m in range(1, 6)
        for s in range(4)
    ]
    page = write_page(paths, root / "long.html").page
    assert page.stat().st_size < 8e6
    assert min(chrome.open(page) for _ in range(3)) < 3  # other work on the machine may slow one of them down
    quiet(chrome)
    assert len(lines(chrome)) == 5


@pytest.mark.slow
def test_hostile_clients_are_not_among_those_served_badly(chrome: Browser, root: Path) -> None:
    path = folders.make(root / "attacked", "robust.attack=sign-flip")
    run = read_run(path)
    hostile = attackers(0, 10, 0.2).tolist()
    assert sum(hostile) == 2
    assert [accuracy is None for accuracy in run.clients] == hostile
    chrome.open(write_page([path]).page)
    points = chrome.do("document.querySelector('#clients .chart').data[0].x.length")
    assert points == 8
    assert "Hostile clients" in chrome.do("document.querySelector('#clients figcaption').textContent")


@pytest.mark.slow
def test_a_run_without_a_round_says_so(chrome: Browser, root: Path) -> None:
    path = folders.make(root / "fresh", rounds=0, status=None)
    chrome.open(write_page([path]).page)
    quiet(chrome)
    assert "No round has been evaluated yet" in chrome.do("document.querySelector('#curves').innerText")
    assert "in progress, 0 of 20 rounds so far" in chrome.do("document.querySelector('#progress').textContent")
    assert "snapshot" in chrome.do("document.querySelector('#progress').textContent")
    assert lines(chrome) == []


@pytest.mark.slow
def test_a_followed_page_goes_on_to_newer_rounds_and_keeps_the_readers_choices(chrome: Browser, root: Path) -> None:
    path = folders.make(root / "going", rounds=3, status=None)
    page = write_page([path], reload_every=0.5).page
    chrome.open(page, "x=seconds")
    assert "3 of 20" in chrome.do("document.querySelector('#progress').textContent")
    click(chrome, "input[name=accuracy][value=local_accuracy]")
    RunFolder(path).append(folders.record(4))
    write_page([path], reload_every=0.5)
    chrome.wait("document.querySelector('#progress')?.textContent.includes('4 of 20')")
    chrome.wait("document.documentElement?.dataset.ready === 'true'")
    assert axis(chrome) == "seconds"
    assert texts(chrome, "#curves .ytitle")[0] == "local accuracy, %"
    click(chrome, "#live")  # pause
    RunFolder(path).finish(folders.summary([folders.record(t) for t in range(1, 5)]))
    write_page([path], reload_every=0.5)
    chrome.do("new Promise((done) => setTimeout(done, 1200))")
    assert chrome.do("document.querySelector('#progress') !== null")
    click(chrome, "#live")
    chrome.wait("document.documentElement?.dataset.ready === 'true' && document.querySelector('#progress') === null")
    assert chrome.do("document.querySelector('#live') === null")
    quiet(chrome)


@pytest.mark.slow
def test_a_zoom_survives_a_reload(page: Browser) -> None:
    page.do(
        """Plotly.relayout(document.querySelector('#curves .chart'),
      {'xaxis.range': [5, 10], 'yaxis.range': [50, 90]}); 0"""
    )
    page.do("delete document.documentElement.dataset.ready; location.reload()")
    page.wait("document.documentElement?.dataset.ready === 'true'")
    assert page.do("document.querySelector('#curves .chart').layout.xaxis.range") == [5, 10]
    click(page, "input[name=x][value=seconds]")
    assert page.do("document.querySelector('#curves .chart').layout.xaxis.range[1]") >= 10
    assert page.do("document.querySelector('#curves .chart').layout.xaxis.autorange") is True


def test_the_samples_of_the_clients_are_a_heat_map(chrome: Browser, root: Path) -> None:
    paths = [folders.with_data(folders.make(root / f"data-{seed}", seed=seed), seed) for seed in (0, 1)]
    chrome.open(write_page(paths, root / "samples.html").page)
    drawn = "document.querySelector('#samples .chart').data[0]"
    assert chrome.do(f"{drawn}.type") == "heatmap"
    assert chrome.do(f"{drawn}.z[1]") == pytest.approx([1 / 3, None, 2 / 3])
    click(chrome, "#samples input[value='1']")
    assert chrome.do(f"{drawn}.z[1]") == pytest.approx([1 / 4, 1 / 4, 2 / 4])
    hover = chrome.do(f"{drawn}.text[1][1]")
    assert "client ward-1, class &lt;b&gt;well&lt;/b&gt;" in hover
    assert "1 sample," in hover
    assert "<b>well</b>" in texts(chrome, "#samples .xtick text")
    assert "ward-9" in texts(chrome, "#samples .ytick text")
    assert chrome.do("document.querySelector('#clients .chart').data[0].text[3]") == "client ward-3, data-0"
    quiet(chrome)


def test_a_run_that_does_not_know_its_clients_has_no_heat_map(page: Browser) -> None:
    assert page.do("document.querySelector('#samples').hidden")
    assert page.do("document.querySelector('#clients .chart').data[0].text[3]").startswith("client 3, ")
