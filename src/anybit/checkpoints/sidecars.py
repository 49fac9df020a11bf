"""Where tools store quantization settings, if not in config.json's ``quantization_config``.

AutoGPTQ (early TheBloke models): quantize_config.json.  AutoAWQ's first versions: quant_config.json, with other keys.
ModelOpt: hf_quant_config.json.  llm-compressor's first versions: ``compression_config`` in config.json.
Vision-language models: in their ``text_config``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files beside config.json; not copied to a requantized model."""

Config = dict[str, Any]
ReadJson = Callable[[Path], Config]


def with_quantization(config: Config, folder: Path, read_json: ReadJson) -> Config:
    """A config.json with its one quantization_config at the top level; unchanged if there is none."""
    entry = config.get("quantization_config") or _elsewhere(config, folder, read_json)
    nested = entry.get("quantization") if isinstance(entry, Mapping) else None
    if isinstance(entry, Mapping) and entry.get("quant_method") == "modelopt" and isinstance(nested, Mapping):
        entry = {**entry, **nested}
    if not entry:
        return config
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and "quantization_config" in inner:
        inner = {name: value for name, value in inner.items() if name != "quantization_config"}
        config = {**config, "text_config": inner}
    return {**{n: v for n, v in config.items() if n != "compression_config"}, "quantization_config": entry}


def _elsewhere(config: Config, folder: Path, read_json: ReadJson) -> Config | None:
    inner, old = config.get("text_config"), config.get("compression_config")
    if isinstance(inner, Mapping) and isinstance(inner.get("quantization_config"), Mapping):
        return dict(inner["quantization_config"])
    if isinstance(old, Mapping) and "format" in old:
        return {**old, "quant_method": "compressed-tensors"}
    if (folder / "quantize_config.json").is_file():
        return {"quant_method": "gptq", **read_json(folder / "quantize_config.json")}
    if (folder / "quant_config.json").is_file():
        settings = read_json(folder / "quant_config.json")
        known = {"bits": settings.get("w_bit"), "group_size": settings.get("q_group_size")}
        return {**settings, **known, "quant_method": "awq"} if None not in known.values() else None
    if (folder / "hf_quant_config.json").is_file():
        return {"quant_method": "modelopt", **read_json(folder / "hf_quant_config.json")}
    return None
