"""Configuration: its sections, how files are read and written, every key, and settings without effect."""

from tdpfed.config.loading import flat, load_config, parse_config, preset_text, presets, to_toml, toml_value
from tdpfed.config.sections import Config

__all__ = ["Config", "flat", "load_config", "parse_config", "preset_text", "presets", "to_toml", "toml_value"]
