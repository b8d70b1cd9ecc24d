"""What a model has beside its trained parameters: frozen ones and buffers, kept once in ``frozen.safetensors``.

Checkpoints hold only what is trained. Without the rest, say a pretrained body, a trained head would be useless. Most
models have nothing of the kind, and their runs no such file.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import nn

from tdpfed.core.layout import Layout
from tdpfed.core.state import State
from tdpfed.errors import TDPFedError
from tdpfed.files import read_file
from tdpfed.runs.checkpoints import for_safetensors
from tdpfed.runs.folder import FROZEN, RunFolder


def frozen_of(model: nn.Module, layout: Layout) -> State:
    """Return the values of a model's ``state_dict`` that are not trained; other names of trained ones are left out."""
    trained = {value.data_ptr() for name, value in model.named_parameters() if name in layout.slices}
    return {name: value for name, value in model.state_dict().items() if value.data_ptr() not in trained}


def keep(folder: RunFolder, model: nn.Module, layout: Layout) -> None:
    """Write the frozen values of a run's model into its folder; refuse others than those that are there."""
    values = for_safetensors(frozen_of(model, layout))
    if not values:
        return
    if not (folder.path / FROZEN).exists():
        folder.write(FROZEN, to_bytes(values))
        return
    there = read(folder.path)
    if there.keys() != values.keys() or any(not torch.equal(value, there[name]) for name, value in values.items()):
        raise TDPFedError(
            f"other frozen parameters or buffers than those of the run in {str(folder.path)!r}; must be the same",
            field="model.name",
        )


def put(path: Path, model: nn.Module) -> None:
    """Give a model the frozen values in a run folder; those of another model are refused."""
    there, own = read(path), model.state_dict()
    wrong = [name for name, value in there.items() if name not in own or own[name].shape != value.shape]
    if wrong:
        raise TDPFedError(
            f"{str(path / FROZEN)!r} holds {wrong[0]!r} of shape {tuple(there[wrong[0]].shape)}, which the model lacks "
            "or has in another shape; must be the run's own model",
            field="model.name",
        )
    model.load_state_dict(there, strict=False)


def read(path: Path) -> State:
    """Return the frozen values in a run folder; nothing if there are none."""
    file = path / FROZEN
    try:
        return from_bytes(read_file(file))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TDPFedError(f"cannot read {str(file)!r} ({error.strerror})", field="RUN") from None
    except (SafetensorError, ValueError, KeyError) as error:
        raise TDPFedError(f"{str(file)!r} is damaged ({error})", field="RUN") from None
