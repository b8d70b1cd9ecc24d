"""What a configuration asks for in vain: settings that change nothing, and a compression that cannot be had.

None of this is an error. A run says it before it starts, so that nobody takes two equal runs for a finding.
"""

from collections.abc import Iterator

from tdpfed.algorithms.base import Algorithm
from tdpfed.config.sections import SECTIONS, Config
from tdpfed.core.setting import default_of, settings_of

NEAR = 0.8
"""Share of the compression asked for below which it counts as missed; whole ranks and biases cost a little anyway."""


def advice(config: Config, algorithm: Algorithm) -> list[str]:
    """Return warnings on a configuration and its algorithm, which is bound to the model."""
    return [*_idle(config), *_silent(config, algorithm), *_unmet(algorithm)]


def _idle(config: Config) -> Iterator[str]:
    """Yield settings that count only with another one, which is not there."""
    data, robust, privacy = config.data, config.robust, config.privacy
    dealt = ("classes", "classes-in-turn")
    for key, counts, needed in (
        ("data.alpha", data.partition == "dirichlet", "data.partition = 'dirichlet'"),
        ("data.per_client", data.partition in (None, *dealt), "data.partition = 'classes' or 'classes-in-turn'"),
        (
            "data.size_skew",
            data.partition in (None, "iid", *dealt),
            "data.partition = 'iid', 'classes' or 'classes-in-turn'",
        ),
        ("robust.fraction", robust.name == "trimmed-mean", "robust.name = 'trimmed-mean'"),
        ("robust.byzantine", robust.name in ("krum", "multi-krum"), "robust.name = 'krum' or 'multi-krum'"),
        ("robust.keep", robust.name == "multi-krum", "robust.name = 'multi-krum'"),
        ("robust.attack_fraction", robust.attack is not None, "robust.attack"),
        ("robust.attack_strength", robust.attack is not None, "robust.attack"),
        ("privacy.delta", privacy.asked is not None, "privacy.clip and privacy.noise"),
    ):
        section, _, name = key.partition(".")
        if not counts and _given(config, section, name):
            yield f"{key}: {getattr(getattr(config, section), name)!r} given, which counts only with {needed}"


def _silent(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Yield settings of what travels, where nothing does."""
    for key, value, usual in (
        ("wire.codec", config.wire.codec, "float32"),
        ("robust.name", config.robust.name, "mean"),
        ("robust.clip", config.robust.clip, None),
    ):
        if not algorithm.communicates and value != usual:
            yield f"{key}: {value!r} given, which changes nothing with {algorithm.name!r}: it sends nothing"


def _unmet(algorithm: Algorithm) -> Iterator[str]:
    """Yield a compression rate that the model does not allow."""
    found = algorithm.compression_reached()
    if found is None:
        return
    asked, rate, why = found
    if rate < NEAR * asked or (rate == 1 and asked != 1):
        yield f"algorithm.compression: {asked:g} given, the model comes to {rate:.3g}: {why}"


def _given(config: Config, section: str, name: str) -> bool:
    """Whether a value is the user's own: no default, or written out in a file that is not a resolved one."""
    defaults = {item.name: default_of(item) for item in settings_of(SECTIONS[section])}
    resolved = all(f"{section}.{key}" in config.given for key, default in defaults.items() if default is not None)
    typed = f"{section}.{name}" in config.given and not resolved
    return bool(getattr(getattr(config, section), name) != defaults[name]) or typed
