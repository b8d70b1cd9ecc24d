"""What a node keeps and never sends, on its own disk: one small folder for each run and client.

A state is a file ``ROUND.safetensors`` below a line with round, session and SHA-256 sum, written under another name,
flushed and renamed. A server that was restarted may ask for rounds again; states from its last checkpoint on are
therefore kept, older ones go. A message from before (an older session, or a round that is over) is refused.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from tdpfed.algorithms.base import State
from tdpfed.errors import TDPFedError
from tdpfed.objective import Objective

FORMAT = 1
_NAME = re.compile(r"([0-9]{8,12})\.safetensors")
_RUN = re.compile(r"[0-9a-f]{16}")


def state_folder(node_config: Mapping[str, Any], run: object, client: int) -> Path:
    """Return where a client keeps what belongs to a run: under the node's ``state-dir``, or the user's state folder."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise TDPFedError(f"run: {run!r} in a message, must be 16 hexadecimal digits")
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    base = node_config.get("state-dir") or os.environ.get("TDPFED_STATE") or Path(home) / "tdpfed"
    return Path(str(base)).expanduser() / run / f"client-{client}"


class PrivateStore:
    """The states of one client in one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def before(self, round_: int, session: int) -> State | None:
        """Return the client's state before a round, None if it has not trained yet."""
        newest = max(self._rounds(), default=None)
        if newest is None:
            return None
        header, state = self._read(newest)
        if (header["session"], newest) > (session, round_):
            raise TDPFedError(
                f"round {round_} of session {session}: this node has gone on to round {newest} of session "
                f"{header['session']}; the message is late and left out"
            )
        return state if newest < round_ else self.upto(round_ - 1)

    def upto(self, round_: int) -> State | None:
        """Return the newest state that is not of a later round than ``round_``."""
        found = max((number for number in self._rounds() if number <= round_), default=None)
        return None if found is None else self._read(found)[1]

    def save(self, round_: int, session: int, state: State, settled: int) -> None:
        """Write the state after a round; keep what a server that falls back to round ``settled`` would need."""
        payload = to_bytes({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})
        path = self._path(round_)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = path.with_suffix(".part")
            with part.open("wb") as file:
                file.write(_header(round_, session, payload) + b"\n" + payload)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            needed = max((number for number in self._rounds() if number <= settled), default=0)
            for number in self._rounds():
                if number < needed or number > round_:
                    self._path(number).unlink()
            descriptor = os.open(self.folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        except OSError as error:
            raise TDPFedError(f"state-dir: cannot write to {str(self.folder)!r} ({error.strerror})") from None

    def _read(self, round_: int) -> tuple[dict[str, Any], State]:
        path = self._path(round_)
        try:
            line, _, payload = path.read_bytes().partition(b"\n")
            header = json.loads(line)
            if line != _header(round_, header["session"], payload):
                raise ValueError("its SHA-256 sum or format is not what was written")
            return header, from_bytes(payload)
        except OSError as error:
            raise TDPFedError(f"state-dir: cannot read {str(path)!r} ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise TDPFedError(
                f"state-dir: {str(path)!r} is damaged ({error}); remove it to go on from the state before it"
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


def _header(round_: int, session: int, payload: bytes) -> bytes:
    sums = {"sha256": hashlib.sha256(payload).hexdigest(), "format": FORMAT, "round": round_, "session": session}
    check = hashlib.sha256(json.dumps(sums).encode()).hexdigest()  # of the line itself
    return json.dumps({**sums, "check": check}).encode()


def load_personalized(folder: Path | str, model: nn.Module) -> dict[str, Tensor]:
    """Return the personalised model in a client's state folder as a ``state_dict`` of ``model``."""
    state = PrivateStore(Path(folder)).upto(10**12)
    objective = Objective.of(model)
    theta = None if state is None else state.get("theta")
    if theta is None or theta.shape != (objective.layout.size,):
        shape = "nothing" if theta is None else f"{tuple(theta.shape)} values"
        raise TDPFedError(f"{str(folder)!r}: holds {shape}, must hold the state of a model of {objective.layout.size}")
    return objective.state_dict(theta.to(torch.float32))
