"""The path of a method's uploads: their form, and what clients keep because of it.

Where uploads are changes, a client keeps beside the method's own private state what its last upload lost (``error``)
and the vectors with which the next power steps start (``vectors``), for each uploaded entry. If an upload does not
reach the server, or is refused there, its content counts as lost: it is added to the error and sent with the next
change.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.layout import Layout
from tdpfed.core.state import WIRE, Entries, State, layouts_of, lengths_of
from tdpfed.cp.plan import rank_for
from tdpfed.errors import TDPFedError, wrong
from tdpfed.wire.blocks import Parts, most_terms
from tdpfed.wire.forms import (
    ChangeForm,
    EntryForm,
    Form,
    SideBySide,
    TopK,
    all_values,
    as_matrix,
    rank_one_terms,
    start_vectors,
    too_large,
)
from tdpfed.wire.settings import DEFAULT_TERMS, Wire


@dataclass(frozen=True)
class Sent:
    """Uploads on their way: the numbers that travel, what the server sees, and what the clients keep."""

    parts: Parts
    seen: State
    kept: State
    too_far: Tensor
    """Whether a client's change ``(K,)`` is larger than :data:`LARGEST_CHANGE` allows, or not finite."""


@dataclass(frozen=True)
class Channel:
    """The path of the uploads of one method, which is bound to a model."""

    algorithm: Algorithm
    wire: Wire
    seed: int

    def __post_init__(self) -> None:
        _ = self.form  # errors are reported at once

    @property
    def changes(self) -> bool:
        """Whether uploads are changes."""
        return self.wire.sends_changes and self.algorithm.communicates

    @cached_property
    def form(self) -> Form:
        """The form of an upload."""
        algorithm, wire = self.algorithm, self.wire
        up, codec = algorithm.up(), wire.number_format
        if not algorithm.communicates:
            return Form.whole(up)
        if not wire.sends_changes:
            return Form.whole(up, codec)
        if algorithm.shared_seed:
            why = f"'dense', without feedback and not int4: {algorithm.name!r} sends other coordinates in each round"
            raise wrong("wire.update", wire.update, why)
        lengths, layouts = lengths_of(up), layouts_of(up)
        if wire.update == "top-k":
            counts = {name: max(1, round(wire.share * length)) for name, length in lengths.items()}
            entries: dict[str, EntryForm] = {n: TopK(lengths[n], counts[n], codec) for n in lengths}
        elif wire.update == "factors":
            if algorithm.plan is not None:
                raise wrong(
                    "wire.update", "factors", f"'dense' or 'top-k': uploads of {algorithm.name!r} are CP factors "
                    "already; their change is small with wire.codec 'int8' or 'int4' and wire.feedback = true",
                )  # fmt: skip
            return factored_form(wire, up)
        else:
            entries = {n: all_values(lengths[n], layouts[n], codec) for n in lengths}
        return Form("change" if wire.update == "dense" else wire.update, codec, entries, layouts)

    def start(self, like: Tensor) -> State:
        """Return what a client keeps before its first round."""
        if not self.changes:
            return {}
        found: State = {}
        for name, form in self._forms().items():
            if self.wire.keeps_lost:
                found[error_of(name)] = like.new_zeros(form.length)
            if form.kept:
                found[vectors_of(name)] = start_vectors(form, name, self.seed, like)
        return found

    def send(self, uploads: State, unchanged: State, kept: State, *, side_by_side: SideBySide | None = None) -> Sent:
        """Return uploads ``(K, n)`` on their way; ``unchanged`` are those of clients that changed nothing."""
        parts: Parts = []
        seen: State = {}
        after: State = {}
        too_far = torch.zeros((), dtype=torch.bool, device=next(iter(uploads.values())).device)
        for name, form in self._forms().items():
            change = uploads[name] - unchanged[name]
            if self.wire.keeps_lost:
                change += kept[error_of(name)]
            vectors = kept.get(vectors_of(name), change[:, :0])
            found, vectors = form.shrink(change, vectors, side_by_side)
            parts += found
            grown = form.grow(found).to(change.dtype)
            too_far = too_far | too_large(grown, unchanged[name])
            if self.wire.keeps_lost:
                after[error_of(name)] = change - grown  # what is sent may be a view of the change
            if form.kept:
                after[vectors_of(name)] = vectors
            seen[name] = grown.add_(unchanged[name])
        return Sent(parts, seen, after, too_far)

    def returned(self, kept: State, seen: State, unchanged: State) -> State:
        """Return what clients keep whose uploads ``(K, n)`` were lost: the lost changes are added to the error."""
        if not self.wire.keeps_lost:
            return kept
        return kept | {error_of(n): kept[error_of(n)] + (seen[n] - unchanged[n]) for n in self._forms()}

    def _forms(self) -> dict[str, ChangeForm]:
        return {name: form for name, form in self.form.entries.items() if isinstance(form, ChangeForm)}


def error_of(entry: str) -> str:
    """Return the name under which a client keeps what its upload of an entry lost."""
    return f"{WIRE}{entry}.error"


def vectors_of(entry: str) -> str:
    """Return the name under which a client keeps the vectors of its last terms."""
    return f"{WIRE}{entry}.vectors"


def factored_form(wire: Wire, entries: Entries, field: str = "wire.terms") -> Form:
    """Return the form of changes of which rank-one terms travel; ``field`` is the key that an error names."""
    lengths, layouts, codec = lengths_of(entries), layouts_of(entries), wire.number_format
    terms = terms_of(wire, layouts, field)
    forms: dict[str, EntryForm] = {
        name: all_values(lengths[name], None, codec)
        if layout is None
        else rank_one_terms(layout, terms.get(name, {}), wire.sweeps, codec, kernels=wire.kernels == "tensor")
        for name, layout in layouts.items()
    }
    return Form("factors", codec, forms, layouts)


def terms_of(wire: Wire, layouts: Mapping[str, Layout | None], field: str) -> dict[str, dict[str, int]]:
    """Return the number of terms of each parameter of two or more dimensions, by entry."""
    shapes = {
        (entry, name): as_matrix(shape, wire.kernels == "tensor")
        for entry, layout in layouts.items()
        if layout is not None
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        if len(shape) >= 2
    }
    if not shapes:
        raise wrong("wire.update", "factors", "'dense' or 'top-k': no uploaded parameter has two or more dimensions")
    if wire.compression is not None:
        _check_compression(wire.compression, list(shapes.values()), layouts)
        count = {place: rank_for(shape, wire.compression) for place, shape in shapes.items()}
    else:
        most = max(map(most_terms, shapes.values()))
        terms = DEFAULT_TERMS if wire.terms is None else wire.terms
        if wire.terms is not None and terms > most:
            raise wrong(field, terms, f"at most {most}, the terms that the largest parameter has")
        count = dict.fromkeys(shapes, terms)
    found: dict[str, dict[str, int]] = {}
    for (entry, name), number in count.items():
        found.setdefault(entry, {})[name] = number
    return found


def _check_compression(asked: float, shapes: list[tuple[int, ...]], layouts: Mapping[str, Layout | None]) -> None:
    """Refuse a rate that even one term per parameter does not reach."""
    total = sum(layout.size for layout in layouts.values() if layout is not None)
    least = total - sum(map(math.prod, shapes)) + sum(min(sum(shape), math.prod(shape)) for shape in shapes)
    if asked > total / least:
        raise TDPFedError(
            f"{asked:g} given, must be at most {total / least:.4g}: each parameter has at least one term, and biases "
            "are sent whole",
            field="wire.compression", value=asked,
        )  # fmt: skip
