"""Models by name, for any input shape and class count: the paper's DNN and VGG8 (Table I), others for images or text.

Each model is a pure function of its parameters: no dropout, no BatchNorm, no buffers. So it works unchanged with
``functional_call``, ``vmap(grad(...))`` over stacked clients, ``torch.export`` and ``torch.compile``; but for ``lstm``
and ``gru``, whose layers PyTorch takes in the first of these only.
"""

import importlib
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from operator import attrgetter, index
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tdpfed.errors import TDPFedError, unknown
from tdpfed.models.transformers import ImageTransformer, TextTransformer

__all__ = ["MODELS", "ModelEntry", "build", "from_spec"]

Shape = tuple[int, ...]
Factory = Callable[[Shape, int], nn.Module]


def build(
    name: str, input_shape: Sequence[int] | None = None, classes: int | None = None, *, seed: int | None = None
) -> nn.Module:
    """Return a new model that maps ``(B, *input_shape)`` to outputs ``(B, classes)``.

    Models of text map tokens ``(B, length)`` to logits of the next one at each place, ``(B, length, classes)``.

    With a seed, the weights are drawn on the CPU from that seed only, and torch's generators are left unchanged.
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    entry = MODELS[name]
    shape, classes = _checked(
        name, entry.input_shape if input_shape is None else input_shape, entry.classes if classes is None else classes
    )
    with seeded(seed):
        return entry.factory(shape, classes)


def from_spec(
    spec: str, input_shape: Sequence[int] | None = None, classes: int | None = None, *, seed: int | None = None
) -> nn.Module:
    """Return ``build(spec, ...)``, or the result of the user's own factory ``"package.module:factory"``.

    The factory is called as ``factory(input_shape, classes)`` if both are given and it accepts two positional
    arguments, otherwise as ``factory()``; the seed applies as in :func:`build`.
    """
    if ":" not in spec:
        return build(spec, input_shape, classes, seed=seed)
    module, _, attribute = spec.partition(":")
    rule = (
        "Allowed: 'package.module:factory', where factory(input_shape, classes) or factory() returns a torch.nn.Module"
    )
    try:
        factory = attrgetter(attribute)(importlib.import_module(module))
        known = input_shape is not None and classes is not None
        with seeded(seed):
            model = factory(tuple(input_shape or ()), classes) if known and _accepts_two(factory) else factory()
    except Exception as error:  # the user's own code may raise anything
        raise TDPFedError(f"{spec!r} failed ({type(error).__name__}: {error}). {rule}", field="model") from error
    if not isinstance(model, nn.Module):
        raise TDPFedError(f"{spec!r} returned a {type(model).__name__}. {rule}", field="model")
    return model


def _accepts_two(factory: Callable[..., object]) -> bool:
    try:
        inspect.signature(factory).bind(None, None)
    except (TypeError, ValueError):  # different arguments, or no signature
        return False
    return True


def _checked(name: str, input_shape: Sequence[int], classes: int) -> tuple[Shape, int]:
    """Return shape and classes as plain integers; reject values that the model does not support."""
    least = MODELS[name].least_side
    rule = "sizes of at least 1" if least is None else f"(channels, height, width), height and width at least {least}"
    try:
        shape = tuple(index(n) for n in input_shape)
    except TypeError:
        shape = ()
    fits = len(shape) > 0 if least is None else len(shape) == 3 and min(shape[1:]) >= least
    if not fits or min(shape) < 1:
        raise TDPFedError(f"{input_shape!r} does not fit {name}. Allowed: {rule}", field="input_shape")
    if classes < 1 or classes != int(classes):
        raise TDPFedError(f"{classes!r}. Allowed: a whole number of at least 1", field="classes")
    return shape, int(classes)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed the CPU generator inside the context and restore it afterwards; without a seed, do nothing."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the GPUs
        yield


def _chain(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def _perceptron(*hidden: int) -> Factory:
    """Return a factory of linear layers ``fc1, fc2, ...`` with ReLU in between; the input is flattened."""

    def factory(shape: Shape, classes: int) -> nn.Module:
        return _chain(**_linear_layers(math.prod(shape), *hidden, classes))

    return factory


def _linear_layers(*sizes: int) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for i, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        if i > 1:
            layers[f"fc{i - 1}_relu"] = nn.ReLU()
        layers[f"fc{i}"] = nn.Linear(inputs, outputs)
    return layers


def _convnet(
    widths: Sequence[int], kernel: int, hidden: Sequence[int], norm_groups: int = 0, padded: bool = True
) -> Factory:
    """Return a factory of ``conv1, conv2, ...``, each with ReLU and 2x2 max-pooling, followed by linear layers.

    With ``norm_groups``, a GroupNorm with that many groups precedes each ReLU of a convolution. Without padding a
    convolution's output is smaller than its input.
    """

    def factory(shape: Shape, classes: int) -> nn.Module:
        channels, height, width = shape
        layers: dict[str, nn.Module] = {}
        for i, (inputs, outputs) in enumerate(pairwise((channels, *widths)), start=1):
            layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2 if padded else 0)
            if norm_groups:
                layers[f"conv{i}_norm"] = nn.GroupNorm(norm_groups, outputs)
            layers[f"conv{i}_relu"] = nn.ReLU()
            layers[f"conv{i}_pool"] = nn.MaxPool2d(2)
        for _ in widths:
            height, width = ((side - (0 if padded else kernel - 1)) // 2 for side in (height, width))
        features = widths[-1] * height * width
        return _chain(**layers, **_linear_layers(features, *hidden, classes))

    return factory


def _vgg8(norm_groups: int = 0) -> Factory:
    """Return a factory of the paper's VGG8, with weights of variance 1/fan_in.

    He's 2/fan_in diverges at the paper's learning rates. ``norm_groups`` adds GroupNorm, which the paper does not have.
    """

    def factory(shape: Shape, classes: int) -> nn.Module:
        model = _convnet((32, 64, 128, 256, 256), 3, (256, 256), norm_groups)(shape, classes)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="linear")
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        return model

    return factory


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    """Return a convolution without bias, followed by GroupNorm with eight groups."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return _chain(conv=conv, norm=nn.GroupNorm(8, outputs))


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _conv_norm(inputs, outputs, 3, stride)
        self.second = _conv_norm(outputs, outputs, 3, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def _resnet(widths: Sequence[int], depth: int) -> Factory:
    """Return a factory of a CIFAR-style ResNet: 3x3 stem, ``depth`` blocks per stage, resolution halved per stage."""

    def factory(shape: Shape, classes: int) -> nn.Module:
        blocks: dict[str, nn.Module] = {}
        inputs = widths[0]
        for stage, outputs in enumerate(widths, start=1):
            for block in range(1, depth + 1):
                stride = 2 if stage > 1 and block == 1 else 1
                blocks[f"stage{stage}_block{block}"] = _ResidualBlock(inputs, outputs, stride)
                inputs = outputs
        return _chain(
            stem=_conv_norm(shape[0], widths[0], 3, 1),
            relu=nn.ReLU(),
            **blocks,
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(inputs, classes),
        )

    return factory


class _Recurrent(nn.Module):
    """Token embeddings, two recurrent layers, and logits of the next token at each place of the sequence."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], tokens: int, width: int = 8, hidden: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.layers = kind(width, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, tokens)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embed(x))[0])
        return logits


def _recurrent(kind: type[nn.LSTM | nn.GRU]) -> Factory:
    def factory(shape: Shape, tokens: int) -> nn.Module:
        del shape  # any length
        return _Recurrent(kind, tokens)

    return factory


class ModelEntry(NamedTuple):
    """A factory ``(input_shape, classes) -> module``, its defaults and the minimum image side (None: any shape)."""

    factory: Factory
    input_shape: Shape
    classes: int
    least_side: int | None
    tokens: bool = False  # the input is a sequence of token ids, below the number of classes


MODELS: Mapping[str, ModelEntry] = MappingProxyType(
    {
        "logistic": ModelEntry(_perceptron(), (60,), 10, None),
        "dnn": ModelEntry(_perceptron(100), (1, 28, 28), 10, None),
        "lenet": ModelEntry(_convnet((6, 16), 5, (120, 84)), (1, 28, 28), 10, 4),
        "cnn": ModelEntry(_convnet((32, 64), 5, (512,), padded=False), (1, 28, 28), 10, 16),
        "vgg8": ModelEntry(_vgg8(), (3, 32, 32), 10, 32),
        "vgg8-gn": ModelEntry(_vgg8(norm_groups=8), (3, 32, 32), 10, 32),
        "resnet8": ModelEntry(_resnet((16, 32, 64), 1), (3, 32, 32), 10, 4),
        "resnet18": ModelEntry(_resnet((64, 128, 256, 512), 2), (3, 32, 32), 10, 8),
        "transformer": ModelEntry(ImageTransformer, (3, 32, 32), 10, 1),
        "tensor-transformer": ModelEntry(partial(ImageTransformer, attention="tensor"), (3, 32, 32), 10, 1),
        "lstm": ModelEntry(_recurrent(nn.LSTM), (80,), 90, None, tokens=True),
        "gru": ModelEntry(_recurrent(nn.GRU), (80,), 90, None, tokens=True),
        "text-transformer": ModelEntry(TextTransformer, (80,), 90, None, tokens=True),
        "text-tensor-transformer": ModelEntry(
            partial(TextTransformer, attention="tensor"), (80,), 90, None, tokens=True
        ),
    }
)
