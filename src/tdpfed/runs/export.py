"""A trained model as a file for others: safetensors with what is needed to use it, or ONNX that takes raw inputs.

Both carry the same metadata, texts by name (:func:`metadata`). A safetensors file holds the parameters of the model
itself, by the names of its ``state_dict``; whoever rebuilds the model normalizes its inputs as the metadata say. An
ONNX file is the whole computation, normalization included.
"""

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save as to_bytes

import tdpfed
from tdpfed.config import Config
from tdpfed.errors import TDPFedError, unknown
from tdpfed.files import write_file
from tdpfed.runs.checkpoints import for_safetensors
from tdpfed.runs.data_card import DataCard
from tdpfed.runs.raw_model import RawModel

Format = Literal["safetensors", "onnx"]
FORMATS: tuple[Format, ...] = get_args(Format)
FORMAT = "tdpfed-model 1"
"""The format of the metadata."""
INPUT, OUTPUT = "x", "outputs"
"""The names of an ONNX model's input ``(batch, *input_shape)`` and output; several inputs have their own names, or
are x0, x1, ..."""


def check_format(format_: str) -> None:
    """Refuse an unknown format, and one whose packages are missing."""
    if format_ not in FORMATS:
        raise unknown("format", format_, FORMATS)
    if format_ == "onnx":
        missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
        if missing:
            raise TDPFedError(
                f"'onnx' needs {' and '.join(missing)}, not installed; pip install 'tdpfed[onnx]'", field="format"
            )


def metadata(config: Config, card: DataCard, round_: int, client: str | None) -> dict[str, str]:
    """Return what a file says about its model; values other than texts are JSON. No client: the global model."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "architecture": config.model.name,
        "input_shape": list(card.input_shape),
        "classes": card.classes,
        "class_names": list(card.class_names),
        "targets": card.targets,
        "normalization": card.normalization.as_dict(),
        "model": "global" if client is None else "personalized",
        **({} if client is None else {"client": client}),
        "algorithm": config.method_name,
        "dataset": card.name,
        "round": round_,
        "seed": config.run.seed,
        "tdpfed": tdpfed.__version__,
    }
    return {name: one if isinstance(one, str) else json.dumps(one) for name, one in values.items()}


def write_model(model: RawModel, file: Path, about: dict[str, str], format_: Format) -> None:
    """Write a model into a file; nothing is left behind if that fails."""
    check_format(format_)
    if format_ == "safetensors":
        content = to_bytes(for_safetensors(model.model.state_dict()), about)
    else:
        content = _as_onnx(model, about)
    write_file(file, content, field="--out")


def _as_onnx(model: RawModel, about: dict[str, str]) -> bytes:
    """Return the model as ONNX for any number of raw inputs."""
    parts, batch = model.inputs.parts, {0: torch.export.Dim("batch")}
    shapes = [part.shape for part in parts] or [model.inputs.shape]
    whole = [part.tokens for part in parts] or [model.tokens]
    types = [torch.int64 if ids else torch.float32 for ids in whole]
    examples = [torch.zeros(2, *shape, dtype=dtype) for shape, dtype in zip(shapes, types, strict=True)]
    names = [part.name or f"{INPUT}{place}" for place, part in enumerate(parts)] or [INPUT]
    with _quiet():
        try:
            made = torch.onnx.export(
                model, tuple(examples), dynamo=True, input_names=names, output_names=[OUTPUT], verbose=False,
                dynamic_shapes=(tuple(batch for _ in examples),),
            )  # fmt: skip
            assert made is not None
            proto = made.model_proto
            for name, value in about.items():
                proto.metadata_props.add(key=name, value=value)
            content: bytes = proto.SerializeToString()
        except Exception as error:  # the exporter raises errors of many kinds
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise TDPFedError(
                f"PyTorch cannot export {about['architecture']!r} to ONNX ({reason[0]}); allowed: safetensors",
                field="format", value="onnx",
            ) from error  # fmt: skip
    return content


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks about packages that are not needed from the terminal."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
