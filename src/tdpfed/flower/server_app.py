"""The server half of an app: a run folder, a checkpoint to start from, rounds until the end."""

import fcntl
import json
import logging
import os
import platform
import secrets
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

import tdpfed
from tdpfed.config import Config, flat, parse_config, to_toml
from tdpfed.engine.store import Store
from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.flower.exchange import Exchange
from tdpfed.flower.node import Metrics, Side
from tdpfed.flower.settings import Flower, read_settings
from tdpfed.flower.strategy import Outcome, Strategy
from tdpfed.flower.task import Task
from tdpfed.runs.checkpoints import Checkpoints, Snapshot
from tdpfed.runs.folder import CONFIG, RunFolder, device_name, source_commit, worst_decile
from tdpfed.runs.loggers import Loggers
from tdpfed.server.records import Record
from tdpfed.wire.meter import dense_bytes

SESSION = "flower.json"
ROUNDS = "rounds.jsonl"
GLOBAL = "global.safetensors"
MOST = 8
"""Keys that are named where two configurations differ."""

ALONE = 20.0
"""Seconds to wait for the run folder: a server app whose SuperLink was killed takes a moment to end."""

log = logging.getLogger("flwr")

NOBODY = Store({}, 0, "ram")
"""The rows of a checkpoint here: clients keep theirs to themselves."""


def server_app(task: Task) -> ServerApp:
    """Return the ServerApp of a task."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            run_server(task, grid, context.run_config)
        except TDPFedError as error:
            log.error("tdpfed: %s", " ".join(str(error).split()))
            raise error.with_traceback(None) from None  # Flower shows it after our line, and where it was is no help

    return app


def run_server(task: Task, grid: Grid, run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Run a federation to its end, from the start or from the newest checkpoint in its folder."""
    config, flower = read_settings(run_config)
    if flower.insecure:
        log.warning("tdpfed: INSECURE: no TLS, no node authentication; anybody may join, read and change messages")
    with _alone(Path(flower.out).expanduser()) as path:
        server = _Server(task, config, flower, path)
        try:
            server.run(Exchange(grid))
        except BaseException as error:
            server.end("failed" if isinstance(error, Exception) else "interrupted", str(error))
            raise
        return server.end("finished")


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Make the run folder, and be the only one that writes to it; the folder itself is the lock."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise TDPFedError(f"flower.out: cannot write to {str(path)!r} ({error.strerror})") from None
    try:
        end = time.monotonic() + ALONE
        while not _lock(descriptor):
            if time.monotonic() > end:
                raise TDPFedError(f"flower.out: another server app runs in {str(path)!r}; give another folder")
            time.sleep(0.2)
        yield path
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


class _Server:
    """A run on the server's disk, and the strategy that advances it."""

    def __init__(self, task: Task, config: Config, flower: Flower, path: Path) -> None:
        torch.set_num_threads(1 if config.run.threads == "auto" else config.run.threads)
        Loggers.check(config)
        side = Side.of(task, config, torch.device("cpu"))
        self.config, self.path = config, path
        self.checkpoints = Checkpoints(self.path / "checkpoints", config.checkpoint.keep)
        self.records: list[Record] = []
        self.folder, run, starts = self._open(flower.nodes)
        self.strategy = Strategy(side, flower, run, starts, lambda text: log.info("tdpfed: %s", text))
        self._resume()
        self.loggers = Loggers(config, self.path)
        self.began = time.perf_counter() - (self.records[-1].seconds if self.records else 0.0)
        known = {"run": run, "starts": self.strategy.starts, "nodes": flower.nodes, "folder": str(path.resolve())}
        self.folder.write(SESSION, json.dumps(known) + "\n")

    def _open(self, nodes: int) -> tuple[RunFolder, str, list[int]]:
        """Return the folder, new or of a run that was begun; the run's name on the nodes; and where it was started."""
        text = to_toml(self.config)
        if not (self.path / CONFIG).exists():
            return RunFolder.create(self.path, text), secrets.token_hex(8), [0]
        folder, before = RunFolder.open(self.path)
        try:
            _check_same(parse_config(tomllib.loads(before)), self.config, self.path)
        except tomllib.TOMLDecodeError as error:
            raise TDPFedError(f"flower.out: {str(self.path / CONFIG)!r} is damaged ({error})") from None
        session = str(self.path / SESSION)
        try:
            known = json.loads((self.path / SESSION).read_text(encoding="utf-8"))
            run, starts, had = str(known["run"]), [*map(int, known["starts"]), 0], int(known["nodes"])
        except FileNotFoundError:
            if self.checkpoints.rounds():
                raise TDPFedError(f"flower.out: {session!r} is gone, by which nodes know the run") from None
            return folder, secrets.token_hex(8), [0]  # killed before anything had begun
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TDPFedError(f"flower.out: {session!r} is damaged ({error})") from None
        if had != nodes:
            raise TDPFedError(
                f"flower.nodes: {nodes} given, must be {had} as in the run that flower.out {str(self.path)!r} holds"
            )
        return folder, run, starts

    def _resume(self) -> None:
        found = self.checkpoints.load()
        if found is not None:
            snapshot, warnings = found
            for name, mine in (("algorithm", self.config.method_name), ("seed", self.config.run.seed)):
                if snapshot.meta.get(name) != mine:
                    raise TDPFedError(f"checkpoint: {name} {snapshot.meta.get(name)!r} saved, must be {mine!r}")
            self.strategy.restore(snapshot.round, snapshot.server, snapshot.meta)
            self.strategy.settled = min(self.checkpoints.rounds(), default=0)
            for warning in warnings:
                log.warning("tdpfed: %s", warning)
            log.info("tdpfed: going on from round %d", snapshot.round)
        if self.strategy.round >= self.config.run.rounds:
            raise TDPFedError(
                f"flower.out: the run in {str(self.path)!r} has its {self.strategy.round} rounds; "
                "give another folder, or more run.rounds"
            )
        self.records = self.folder.rewind(self.strategy.round, ROUNDS)

    def run(self, exchange: Exchange) -> None:
        """Advance to the last round."""
        strategy, last = self.strategy, self.config.run.rounds
        strategy.gather(exchange)
        while strategy.round < last:
            began, waited = time.perf_counter(), exchange.waited
            number = strategy.round + 1
            due = number == last or number % self.config.run.evaluate_every == 0
            if not self.config.checkpoint.every:
                strategy.settled = strategy.round  # there is nothing to fall back to
            try:
                outcome = strategy.step(exchange, due)
            except QuorumError:
                self.folder.refuse(number, strategy.refused)
                raise
            seconds = time.perf_counter() - began
            if due:
                self._record(outcome, strategy.evaluate(exchange))
            self.folder.refuse(strategy.round, outcome.refused)
            every = self.config.checkpoint.every
            if every and (strategy.round % every == 0 or strategy.round == last):
                self._save()
            own = time.perf_counter() - began - (exchange.waited - waited)
            self._note(outcome, seconds, time.perf_counter() - began, own)

    def _save(self) -> None:
        meta = {"algorithm": self.config.method_name, "seed": self.config.run.seed, **self.strategy.state()}
        self.checkpoints.save(Snapshot(self.strategy.round, dict(self.strategy.server), NOBODY, meta), None)
        self.strategy.settled = min(self.checkpoints.rounds(), default=0)

    def _record(self, outcome: Outcome, scores: dict[int, Metrics]) -> None:
        strategy, losses = self.strategy, [m["loss"] for m in outcome.metrics.values() if "loss" in m]

        def share(found: Mapping[int, Metrics], key: str) -> float | None:
            having = [client for client in found if key in found[client]]
            tests = sum(strategy.members[client].tests for client in having)
            return sum(found[client][key] for client in having) / tests if tests else None

        tests = {client: member.tests for client, member in strategy.members.items()}
        right = {client: found.get("personalized_correct") for client, found in scores.items()}
        record = Record(
            round=strategy.round,
            loss=sum(losses) / len(losses) if losses else None,
            personalized_accuracy=share(scores, "personalized_correct"),
            local_accuracy=share(outcome.metrics, "local_correct"),
            global_accuracy=share(scores, "global_correct"),
            personalized_loss=share(scores, "personalized_loss"),
            global_loss=share(scores, "global_loss"),
            client_accuracy=[
                correct / tests[client] if (correct := right.get(client)) is not None and tests[client] else None
                for client in range(strategy.flower.nodes)
            ],
            uplink_bytes=strategy.ledger.uplink,
            downlink_bytes=strategy.ledger.downlink,
            participants=len(outcome.metrics),
            seconds=time.perf_counter() - self.began,
            rejected=strategy.ledger.rejected,
        )
        self.folder.append(record)
        self.records.append(record)
        self.loggers.record(record)

    def _note(self, outcome: Outcome, train: float, whole: float, own: float) -> None:
        """Add a line on the round: who was lost and why, bytes, and where the time went."""
        clients = [found["seconds"] for found in outcome.metrics.values() if "seconds" in found]
        line = {
            "round": self.strategy.round, "replies": len(outcome.metrics), "uplink_bytes": outcome.uplink,
            "lost": {str(client): reason for client, reason in outcome.lost.items()},
            "refused": [str(one) for one in outcome.refused], "seconds": whole, "train_seconds": train,
            "server_seconds": own, "client_seconds": max(clients, default=None),
        }  # fmt: skip
        log.info("tdpfed: round %d of %d: %s", self.strategy.round, self.config.run.rounds, json.dumps(line))
        with (self.path / ROUNDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def end(self, status: str, error: str = "") -> dict[str, Any]:
        """Write the global model and the summary."""
        strategy, side, ledger = self.strategy, self.strategy.side, self.strategy.ledger
        shipped = side.algorithm.global_model(strategy.server)
        if shipped is not None:
            tensors = {name: value.contiguous().clone() for name, value in side.objective.state_dict(shipped).items()}
            save_file(tensors, self.path / f"{GLOBAL}.part")
            (self.path / f"{GLOBAL}.part").replace(self.path / GLOBAL)
        last = self.records[-1] if self.records else None
        best = [r.personalized_accuracy for r in self.records if r.personalized_accuracy is not None]
        layout = side.objective.layout
        dense = dense_bytes(layout)
        summary = {
            "status": status,
            "algorithm": side.algorithm.name,
            "dataset": self.config.data.name,
            "model": self.config.model.name,
            "rounds": strategy.round,
            "seed": self.config.run.seed,
            "clients": strategy.flower.nodes,
            "parameters": layout.size,
            "personalized_accuracy": last.personalized_accuracy if last else None,
            "local_accuracy": last.local_accuracy if last else None,
            "global_accuracy": last.global_accuracy if last else None,
            "best_personalized_accuracy": max(best, default=None),
            "worst_decile_accuracy": worst_decile(last.client_accuracy) if last else None,
            "train_loss": last.loss if last else None,
            "uplink_bytes": ledger.uplink,
            "downlink_bytes": ledger.downlink,
            "bytes_per_client_round": ledger.per_client_round,
            "rejected_uploads": ledger.rejected,
            "epsilon": None,
            "delta": None,
            "compression_rate": dense * ledger.uploads / ledger.uplink if ledger.uplink else None,
            "seconds": time.perf_counter() - self.began,
            "device": f"Flower server, {device_name(torch.device('cpu'))}",
            "commit": source_commit(),
            "versions": {"tdpfed": tdpfed.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "error": error or None,
        }
        self.folder.finish(summary)
        self.loggers.end(summary)
        return summary


def _check_same(before: Config, now: Config, path: Path) -> None:
    """Refuse to go on with a run under another configuration; it may be made longer."""
    old, new = flat(before.as_dict()), flat(now.as_dict())
    other = [key for key in sorted(old.keys() | new.keys()) if key != "run.rounds" and old.get(key) != new.get(key)]
    if not other:
        return
    told = "; ".join(f"{key}: {new.get(key)!r} given, must be {old.get(key)!r}" for key in other[:MOST])
    more = f"; and {len(other) - MOST} more" if len(other) > MOST else ""
    raise TDPFedError(
        f"{told}{more}, as in the run that flower.out {str(path)!r} holds; give another folder for another run"
    )
