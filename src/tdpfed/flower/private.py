"""The private state that a node keeps on its own disk and never sends: one small folder for each run and client.

A state is a file ``ROUND.safetensors`` that begins with a line of round, session and SHA-256 checksum; it is written
under a temporary name, flushed and renamed. A restarted server may repeat rounds: states from its oldest checkpoint on
are therefore kept, and older ones are deleted. A late message (of an earlier session or a completed round) is refused,
and a state of a round that the server has since discarded is never used.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from tdpfed.core.objective import Objective
from tdpfed.core.state import State
from tdpfed.errors import TDPFedError
from tdpfed.files import PART, sync_folder, write_errors, write_file

FORMAT = 2
_NAME = re.compile(r"([0-9]{8,12})\.safetensors")
_RUN = re.compile(r"[0-9a-f]{16}")
_STARTS = re.compile(r"0(,[0-9]{1,10}){0,9999}")


def state_folder(node_config: Mapping[str, Any], run: object, client: int) -> Path:
    """Return the folder of a client's states in a run: under the node's ``state-dir``, or the user's state folder."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise TDPFedError(f"run: {run!r} in a message, must be 16 hexadecimal digits")
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    base = node_config.get("state-dir") or os.environ.get("TDPFED_STATE") or Path(home) / "tdpfed"
    return Path(str(base)).expanduser() / run / f"client-{client}"


def starts_of(value: object) -> tuple[int, ...]:
    """Return the rounds after which the server's sessions started, from their form in a message: ``0,12,30``."""
    if not isinstance(value, str) or not _STARTS.fullmatch(value):
        raise TDPFedError(f"starts: {str(value)[:40]!r} in a message, must be rounds separated by commas, 0 first")
    return tuple(int(number) for number in value.split(","))


class PrivateStore:
    """The states of one client in one run; ``starts`` are the rounds after which the server's sessions started."""

    def __init__(self, folder: Path, starts: Sequence[int] = (0,)) -> None:
        self.folder, self.starts = folder, starts

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold an exclusive lock from reading a state to writing the next one; the folder itself is the lock."""
        with write_errors("state-dir", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def before(self, round_: int, session: int) -> State | None:
        """Return the client's state before a round, None if it has not trained yet."""
        self._check_not_late(round_, session)
        return self.upto(round_ - 1)

    def upto(self, round_: int) -> State | None:
        """Return the newest state of round ``round_`` or earlier, None if there never was one."""
        headers = self._headers()
        found = max((n for n, header in headers.items() if n <= round_ and self._is_valid(header)), default=None)
        if found is not None:
            return self._read(found)
        for header in headers.values():
            if header["floor"] and self._limit(header["session"]):
                raise TDPFedError(
                    f"state-dir: the state of round {round_} or earlier is needed but deleted: {str(self.folder)!r} "
                    f"begins with round {min(headers)}; remove that folder to restart this client"
                )
        return None

    def save(self, round_: int, session: int, state: State, settled: int) -> None:
        """Write the state after a round; keep the states needed by a server that restarts from round ``settled``."""
        self._check_not_late(round_, session)
        payload = to_bytes({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})
        old = {number: header for number, header in self._headers().items() if number != round_}
        needed = max(
            (number for number, header in old.items() if number <= settled and self._is_valid(header)), default=0
        )
        obsolete = [n for n, header in old.items() if n < needed or n > round_ or not self._is_valid(header)]
        floors = [header["floor"] for header in old.values() if self._limit(header["session"])]
        floor = max([*floors, needed if any(number < needed for number in obsolete) else 0])
        content = _header(round_, session, floor, payload) + b"\n" + payload
        with write_errors("state-dir", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_file(self._path(round_), content, field="state-dir", unique=True)
            for number in obsolete:
                self._path(number).unlink(missing_ok=True)
            for left in self.folder.glob(f"*{PART}"):  # of a killed process: the lock excludes any other writer
                left.unlink(missing_ok=True)
            sync_folder(self.folder)

    def _check_not_late(self, round_: int, session: int) -> None:
        """Reject a round that this node has already passed."""
        last = max(((header["session"], number) for number, header in self._headers().items()), default=(0, 0))
        if last > (session, round_):
            raise TDPFedError(
                f"round {round_} of session {session}: this node is already at round {last[1]} of session "
                f"{last[0]}; the message is late and ignored"
            )

    def _limit(self, session: int) -> float:
        """Return the last round of a session that no later session has discarded."""
        return min(self.starts[session:], default=float("inf"))

    def _is_valid(self, header: Mapping[str, Any]) -> bool:
        return bool(header["round"] <= self._limit(header["session"]))

    def _headers(self) -> dict[int, dict[str, Any]]:
        return {number: self._header(number) for number in self._rounds()}

    def _header(self, round_: int) -> dict[str, Any]:
        with self._read_errors(round_), self._path(round_).open("rb") as file:
            return _parsed(file.readline(1 << 12).removesuffix(b"\n"), round_)

    def _read(self, round_: int) -> State:
        with self._read_errors(round_):
            line, _, payload = self._path(round_).read_bytes().partition(b"\n")
            if _parsed(line, round_)["sha256"] != hashlib.sha256(payload).hexdigest():
                raise ValueError("its SHA-256 checksum does not match")
            state: State = from_bytes(payload)
            return state

    @contextmanager
    def _read_errors(self, round_: int) -> Iterator[None]:
        path = str(self._path(round_))
        try:
            yield
        except OSError as error:
            raise TDPFedError(f"state-dir: cannot read {path!r} ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            raise TDPFedError(
                f"state-dir: {path!r} is damaged ({error}); remove it to continue from the previous state"
            ) from None

    def _rounds(self) -> list[int]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise TDPFedError(f"state-dir: cannot read {str(self.folder)!r} ({error.strerror})") from None
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def _path(self, round_: int) -> Path:
        return self.folder / f"{round_:08}.safetensors"


def _header(round_: int, session: int, floor: int, payload: bytes) -> bytes:
    """Return the first line of a file; states before round ``floor`` have been removed."""
    sums = {"sha256": hashlib.sha256(payload).hexdigest(), "format": FORMAT, "round": round_, "session": session}
    return _sealed({**sums, "floor": floor})


def _sealed(values: Mapping[str, Any]) -> bytes:
    check = hashlib.sha256(json.dumps(values).encode()).hexdigest()  # of the line itself
    return json.dumps({**values, "check": check}).encode()


def _parsed(line: bytes, round_: int) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(line)
    if line != _sealed({name: value for name, value in values.items() if name != "check"}):
        raise ValueError("the checksum of its first line does not match")
    if (values["format"], values["round"]) != (FORMAT, round_):
        raise ValueError(f"format {values['format']} and round {values['round']}, must be {FORMAT} and {round_}")
    return values


def load_personalized(folder: Path | str, model: nn.Module) -> dict[str, Tensor]:
    """Return the personalized model in a client's state folder as a ``state_dict`` of ``model``."""
    state = PrivateStore(Path(folder)).upto(10**12)
    objective = Objective.of(model)
    theta = None if state is None else state.get("theta")
    if theta is None or theta.shape != (objective.layout.size,):
        shape = "nothing" if theta is None else f"{tuple(theta.shape)} values"
        raise TDPFedError(f"{str(folder)!r}: holds {shape}, must hold a model of {objective.layout.size} values")
    return objective.state_dict(theta.to(torch.float32))
