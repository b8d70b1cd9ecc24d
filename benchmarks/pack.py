"""Pack run folders into one file, and restore them from it.

``python benchmarks/pack.py pack FOLDER`` writes the runs below FOLDER to ``FOLDER/runs.jsonl.gz`` and removes their
folders. ``python benchmarks/pack.py unpack FILE DIR`` restores them in DIR, so that ``tdpfed report DIR`` reads them.

A packed file is gzip-compressed JSON Lines, one run per line in the order of their names: ``name`` of the run folder,
``config`` (the text of ``config.toml``), ``federation`` (that of ``federation.json``, which runs of older versions do
not have), ``records`` (``metrics.jsonl``), ``refusals`` if there were any, and ``summary``, null for a run that
was stopped. The same runs always give the same bytes.
"""

import argparse
import gzip
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tdpfed.runs.folder import CONFIG, FEDERATION, METRICS, REFUSALS, SUMMARY

PACKED = "runs.jsonl.gz"
CHECKPOINTS = "checkpoints"

PackedRun = dict[str, Any]


def read(path: Path) -> dict[str, PackedRun]:
    """Return the runs of a packed file by name."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return {run["name"]: run for run in map(json.loads, file)}


def write(path: Path, runs: Iterable[PackedRun]) -> None:
    """Write a packed file atomically."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        for run in sorted(runs, key=lambda run: str(run["name"])):
            file.write((json.dumps(run) + "\n").encode())
    temporary.replace(path)


def find(folder: Path) -> list[Path]:
    """Return the run folders below a folder."""
    return sorted(path.parent for path in folder.rglob(CONFIG) if (path.parent / METRICS).is_file())


def from_folder(path: Path, drop_checkpoints: bool = False) -> PackedRun:
    """Return one run folder as a packed run; a file that would be lost is an error."""
    known = {CONFIG, FEDERATION, METRICS, REFUSALS, SUMMARY} | ({CHECKPOINTS} if drop_checkpoints else set())
    for entry in path.iterdir():
        if entry.name not in known:
            raise SystemExit(f"{entry}: would be lost; remove it first, or give --drop-checkpoints for checkpoints")
    run: PackedRun = {"name": path.name, "config": (path / CONFIG).read_text(encoding="utf-8")}
    if (path / FEDERATION).exists():
        run["federation"] = (path / FEDERATION).read_text(encoding="utf-8")
    run["records"] = _lines(path / METRICS)
    if (path / REFUSALS).exists():
        run["refusals"] = _lines(path / REFUSALS)
    summary = path / SUMMARY
    run["summary"] = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else None
    return run


def to_folder(run: PackedRun, path: Path) -> None:
    """Restore one run folder."""
    path.mkdir(parents=True)
    for name, text in ((CONFIG, run["config"]), (FEDERATION, run.get("federation"))):
        if text is not None:
            (path / name).write_text(text, encoding="utf-8")
    for name, records in ((METRICS, run["records"]), (REFUSALS, run.get("refusals"))):
        if records is not None:
            text = "".join(json.dumps(record) + "\n" for record in records)
            (path / name).write_text(text, encoding="utf-8")
    if run["summary"] is not None:
        (path / SUMMARY).write_text(json.dumps(run["summary"], indent=2) + "\n", encoding="utf-8")


def pack(folder: Path, drop_checkpoints: bool = False) -> Path:
    """Pack the runs below a folder and remove their folders; runs packed earlier are kept unless replaced."""
    found = find(folder)
    if not found:
        raise SystemExit(f"{folder}: no run folder below it")
    if repeated := {path.name for path in found if [one.name for one in found].count(path.name) > 1}:
        raise SystemExit(f"{folder}: several runs are named {', '.join(sorted(repeated))}")
    packed = folder / PACKED
    runs = {path.name: from_folder(path, drop_checkpoints) for path in found}
    everything = (read(packed) if packed.exists() else {}) | runs
    write(packed, everything.values())
    if read(packed) != everything:
        raise SystemExit(f"{packed}: does not read back as it was written; no run folder was removed")
    for path in found:
        shutil.rmtree(path)
        if path.parent != folder and not any(path.parent.iterdir()):
            path.parent.rmdir()
    return packed


def unpack(packed: Path, folder: Path) -> list[Path]:
    """Restore the runs of a packed file as folders; an existing folder is an error."""
    runs = read(packed)
    for name in runs:
        if not name or Path(name).name != name or name == "..":
            raise SystemExit(f"{packed}: {name!r} is not the name of a folder")
        if (folder / name).exists():
            raise SystemExit(f"{folder / name}: already exists")
    for name, run in runs.items():
        to_folder(run, folder / name)
    return [folder / name for name in runs]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packs = commands.add_parser("pack", help="run folders into one file")
    packs.add_argument("folder", type=Path)
    packs.add_argument("--drop-checkpoints", action="store_true", help="remove checkpoints along with the folders")
    unpacks = commands.add_parser("unpack", help="one file into run folders")
    unpacks.add_argument("file", type=Path)
    unpacks.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "pack":
        print(pack(options.folder, options.drop_checkpoints))
    else:
        print(f"{len(unpack(options.file, options.folder))} runs restored in {options.folder}")


if __name__ == "__main__":
    main()
