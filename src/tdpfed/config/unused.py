"""Settings of a configuration that have no effect, and a compression that cannot be reached.

These are not errors. A run prints them as warnings before it starts, so that two identical runs are not mistaken for a
result.
"""

from collections.abc import Iterator

from tdpfed.algorithms.base import Algorithm
from tdpfed.config.sections import SECTIONS, Config
from tdpfed.core.setting import default_of, settings_of
from tdpfed.data.build import BY_CLASS, SKEWED

TOLERANCE = 0.8
"""Fraction of the requested compression below which a warning is given; whole ranks and biases always cost a little."""

CHOOSING = ("validation", "choose_rounds", "alone_rate", "mixes", "margin", "choice_batches")
"""The keys of ``evaluation`` that only the choice of models uses."""


def advice(config: Config, algorithm: Algorithm) -> list[str]:
    """Return warnings about a configuration and its algorithm, which is bound to the model."""
    return [
        *_without_effect(config),
        *_without_uploads(config, algorithm),
        *_without_factors(config, algorithm),
        *_compression_missed(algorithm),
    ]


def _without_effect(config: Config) -> Iterator[str]:
    """Yield settings that have an effect only with another setting, which is not given."""
    data, robust, privacy, wire = config.data, config.robust, config.privacy, config.wire
    up, down = wire.update == "factors", wire.down == "factors"
    best, chosen = config.evaluation.personalize == "best", "evaluation.personalize = 'best'"
    stepping, either = config.server.optimizer, "wire.update = 'factors' or wire.down = 'factors'"
    for key, counts, needed in (
        ("data.alpha", data.partition == "dirichlet", "data.partition = 'dirichlet'"),
        ("data.capped", data.partition == "dirichlet", "data.partition = 'dirichlet'"),
        (
            "data.per_client",
            data.partition in (None, *BY_CLASS),
            "data.partition = 'classes', 'classes-in-turn' or 'classes-in-groups'",
        ),
        (
            "data.size_skew",
            data.partition in (None, *SKEWED),
            "data.partition = 'iid', 'classes' or 'classes-in-turn'",
        ),
        ("robust.fraction", robust.name == "trimmed-mean", "robust.name = 'trimmed-mean'"),
        ("robust.byzantine", robust.name in ("krum", "multi-krum"), "robust.name = 'krum' or 'multi-krum'"),
        ("robust.keep", robust.name == "multi-krum", "robust.name = 'multi-krum'"),
        ("robust.bound", privacy.asked is None, "differential privacy off, which clips every update itself"),
        ("robust.weight_cap", config.method.weights == "samples", "algorithm.weights = 'samples'"),
        ("robust.attack_fraction", robust.attack is not None, "robust.attack"),
        ("robust.attack_strength", robust.attack not in (None, "zeros", "label-flip"), "another robust.attack"),
        ("privacy.delta", privacy.asked is not None, "privacy.clip and privacy.noise"),
        ("wire.terms", up, "wire.update = 'factors'"),
        ("wire.compression", up, "wire.update = 'factors'"),
        ("wire.sweeps", up or down, either),
        ("wire.kernels", up or down, either),
        ("wire.share", wire.update == "top-k", "wire.update = 'top-k'"),
        ("wire.down_terms", down, "wire.down = 'factors'"),
        ("wire.down_codec", down, "wire.down = 'factors'"),
        ("optimizer.rounds", config.optimizer.schedule == "cosine", "optimizer.schedule = 'cosine'"),
        ("optimizer.every", config.optimizer.schedule == "step", "optimizer.schedule = 'step'"),
        ("optimizer.factor", config.optimizer.schedule == "step", "optimizer.schedule = 'step'"),
        *((f"evaluation.{name}", best, chosen) for name in CHOOSING),
        ("evaluation.validation", not config.data.validation, "data.validation = 0, which is used for the choice too"),
        ("server.rate", stepping != "average", "server.optimizer = 'sgd', 'adam' or 'yogi'"),
        ("server.momentum", stepping != "average", "server.optimizer = 'sgd', 'adam' or 'yogi'"),
        ("server.decay", stepping in ("adam", "yogi"), "server.optimizer = 'adam' or 'yogi'"),
        ("server.floor", stepping in ("adam", "yogi"), "server.optimizer = 'adam' or 'yogi'"),
    ):
        section, _, name = key.partition(".")
        if not counts and _given(config, section, name):
            yield f"{key}: {getattr(getattr(config, section), name)!r} given, which has an effect only with {needed}"


def _without_uploads(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Yield settings of uploads for a method that uploads nothing."""
    for key, value, usual in (
        ("wire.update", config.wire.update, "dense"),
        ("wire.codec", config.wire.codec, None),
        ("wire.feedback", config.wire.feedback, None),
        ("wire.down", config.wire.down, "dense"),
        ("robust.name", config.robust.name, "mean"),
        ("robust.clip", config.robust.clip, None),
    ):
        if not algorithm.communicates and value != usual:
            yield f"{key}: {value!r} given, which has no effect with {algorithm.name!r}: it uploads nothing"


def _without_factors(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Yield settings of CP factors for a method that sends none, whose uploads have no gauge."""
    for key, value, usual in (
        ("robust.gauge", config.robust.gauge, None),
        ("robust.norms", config.robust.norms, "mean"),
    ):
        if algorithm.plan is None and value != usual:
            yield f"{key}: {value!r} given, which has no effect with {algorithm.name!r}: it sends no CP factors"


def _compression_missed(algorithm: Algorithm) -> Iterator[str]:
    """Yield a warning if the requested compression rate is not reached."""
    found = algorithm.compression_reached()
    if found is None:
        return
    asked, rate, why = found
    if rate < TOLERANCE * asked or (rate == 1 and asked != 1):
        yield f"algorithm.compression: {asked:g} given, {rate:.3g} reached: {why}"


def _given(config: Config, section: str, name: str) -> bool:
    """Whether the user set a value: not the default, or explicit in a file that is not a resolved configuration."""
    defaults = {item.name: default_of(item) for item in settings_of(SECTIONS[section])}
    resolved = all(f"{section}.{key}" in config.given for key, default in defaults.items() if default is not None)
    typed = f"{section}.{name}" in config.given and not resolved
    return bool(getattr(getattr(config, section), name) != defaults[name]) or typed
