"""Run folders that are damaged, or made to do harm: whoever reads one gets numbers, or an error that names a file."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save
from torch import nn

import small
from spoil import mutated
from tdpfed import FedAvg, load_run, simulate
from tdpfed.engine.attacks import Attack
from tdpfed.errors import TDPFedError
from tdpfed.files import lock_folder
from tdpfed.report import read_run, write_page
from tdpfed.runs.folder import RunFolder
from tdpfed.server.robust import Rule

pytestmark = pytest.mark.hostile

CLIENTS = 5


def model() -> nn.Module:
    """A model whose first layer is frozen, so that its runs keep the frozen values."""
    made = small.mlp()
    made.get_submodule("fc1").requires_grad_(False)
    return made


def begin(path: Path, rounds: int = 3, resume: bool = False) -> None:
    """Run, or resume, a run that writes every file that a run can have."""
    simulate(
        model(), small.federation(CLIENTS, dtype=torch.float32), FedAvg(**small.COMMON), rounds, out=path,
        attack=Attack("huge"), rule=Rule(patience=0), resume=resume,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "run"
    begin(path)
    return path


def words_of(read: Callable[[], object]) -> str:
    """Return the error of a reader; empty if there is none."""
    try:
        read()
        words = ""
    except TDPFedError as error:
        words = str(error)
    assert len(words) < 5000
    return words


def in_python(path: Path) -> None:
    """Read all that Python can have of a run."""
    run = load_run(path, model=model())
    for read in (
        lambda: run.config, lambda: run.settings, lambda: run.summary, lambda: run.records, lambda: run.card,
        run.global_model, run.clients, lambda: run.personalized(run.ids[0]),
        lambda: run.export(path.parent / "model.safetensors"),
    ):  # fmt: skip
        words_of(read)


READ: dict[str, Callable[[Path], object]] = {
    "report": lambda path: write_page([path], path.parent / "page.html"),
    "python": in_python,
    "resume": lambda path: begin(path, 4, resume=True),
    "done": lambda path: RunFolder(path).done,
}


def test_such_a_run_has_every_kind_of_file_and_no_notes(made: Path) -> None:
    names = {path.name for path in made.iterdir()}
    assert {"config.toml", "federation.json", "frozen.safetensors", "metrics.jsonl", "refusals.jsonl"} < names
    found = read_run(made)
    assert (found.status, found.notes) == ("finished", [])


@pytest.mark.parametrize("count", [60, pytest.param(3_000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # of figures without numbers
def test_a_mutated_run_folder_is_read_or_refused(made: Path, tmp_path: Path, count: int) -> None:
    random, refused = Random(0), 0
    names = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
    contents = {name: (made / name).read_bytes() for name in names}
    for number in range(count):
        name, how = names[number % len(names)], random.choice([*READ])
        path = shutil.copytree(made, tmp_path / "run")
        (path / name).write_bytes(mutated(contents[name], random))
        try:
            refused += bool(words_of(partial(READ[how], path)))
        except Exception as error:
            raise AssertionError(f"{how} of another {name} (number {number})") from error
        lock_folder(path, field="x").release()  # whatever happened, nobody holds it
        shutil.rmtree(path)
    assert refused > count // 20


DEEP = "[" * 5000
HARM: dict[str, tuple[str, bytes]] = {
    "a deep configuration": ("config.toml", f"a = {DEEP}".encode()),
    "a configuration of many digits": ("config.toml", b"[run]\nrounds = 0x" + b"f" * 5000),
    "a deep summary": ("summary.json", DEEP.encode()),
    "a summary that is a list": ("summary.json", b"[1]"),
    "a summary of many digits": ("summary.json", b'{"rounds": ' + b"9" * 5000 + b"}"),
    "deep records": ("metrics.jsonl", f"{DEEP}\n".encode()),
    "no records": ("metrics.jsonl", b""),
    "a record that is a number": ("metrics.jsonl", b"1\n"),
    "deep data": ("federation.json", DEEP.encode()),
    "deep refusals": ("refusals.jsonl", f"{DEEP}\n".encode()),
    "frozen values of another shape": ("frozen.safetensors", save({"fc1.weight": torch.zeros(3, 3)})),
    "frozen values of another name": ("frozen.safetensors", save({"fc9.weight": torch.zeros(3, 3)})),
    "a deep checkpoint": ("checkpoints/checkpoint-000003.json", DEEP.encode()),
}


@pytest.mark.parametrize("how", HARM)
@pytest.mark.parametrize("reader", READ)
@pytest.mark.filterwarnings("ignore")
def test_a_file_made_to_do_harm_is_refused_in_few_words(made: Path, tmp_path: Path, how: str, reader: str) -> None:
    name, content = HARM[how]
    path = shutil.copytree(made, tmp_path / "run")
    (path / name).write_bytes(content)
    words_of(partial(READ[reader], path))
