"""Damaged model folders: seeded mutations of configurations, indexes, headers, tensors, tokenizers and GGUF files.

A mutation changes one thing in a copy of a good folder. ``kind`` names it; ``VALID`` lists the kinds after which
no loader can detect the change, since the result is a valid folder of another model.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import pre_tokenizers

VALID = {
    "hyperparameter": "another value of one, or its default",
    "scheme of activations": "the same codes, multiplied otherwise",
    "tensor: another value": "weights of any finite values",
    "tokenizer": "another tokenizer",
    "header: an empty tensor is gone": "what keeps other programs out",
    "gguf: a byte": "metadata that change a hyperparameter, or values of tensors",
    "gguf: an entry is renamed": "a hyperparameter at its default",
}
"""Mutations that may give another model without an error, and how that model differs."""

NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 100, 10_000, 10**9, 2**31, 2**63, 10**30, 0.5, 1.5, -0.0, 1e30, 1e300,
    float("nan"), float("inf"), float("-inf"), "", "x", "1", "\x1b[2J\x1b]0;owned\x07", "../../etc/passwd", "a" * 5000,
    [], [1], ["x"], [None], [[]], {}, {"a": 1}, {"quant_method": "gptq"}, "(a+)+$", [["a"]], "gelu", "llama", "gpt2",
    "cuda",
)  # fmt: skip
"""Values that no entry expects, and some that several do."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One mutation of a folder. kind: one of ``kinds``; what: details, for a message."""

    kind: str
    what: str


def damaged(rng: random.Random, folder: Path, groups: tuple[str, ...], number: int) -> Damage:
    """Change one thing in a folder, in place. number: kinds of damage take turns, so that few folders show them all."""
    while True:
        mutations = MUTATIONS[groups[number % len(groups)]]
        damage = mutations[number // len(groups) % len(mutations)](rng, folder)
        if damage is not None:
            return damage
        number += 1


def copy(source: Path, target: Path) -> Path:
    """Copy a folder, replacing an earlier copy."""
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target)


# ---- config.json, and JSON in general


HYPERPARAMETERS = {
    "attention_bias", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "hidden_act", "initializer_range",
    "max_position_embeddings", "mlp_bias", "pad_token_id", "pretraining_tp", "rms_norm_eps", "rope_parameters",
    "rope_theta", "rope_type", "tie_word_embeddings", "torch_dtype", "use_cache",
}  # fmt: skip
"""Entries of config.json unrelated to the tensors: other values give another valid model."""

UNREADABLE = {"config", "hyperparameter", "config: spoilt", "config: deep"}
"""Kinds that `from_pretrained` may refuse in transformers' own words: it reads config.json before asking anybit."""


def _change_entry(rng: random.Random, file: Path, kind: str) -> Damage:
    config = json.loads(file.read_text())
    owner, key = rng.choice(_places(config))
    before = owner[key]
    if kind == "config":
        kind = "hyperparameter" if key in HYPERPARAMETERS else {"quantization_config": "quantization"}.get(key, kind)
    if rng.random() < 0.15:
        del owner[key]
        return _written(file, config, kind, f"{key} is gone")
    if rng.random() < 0.3 and type(before) in (int, float):
        owner[key] = type(before)(before * rng.choice([2, 0.5, -1, 1000, 1e6]))
    elif rng.random() < 0.2 and isinstance(before, str):
        owner[key] = rng.choice([before + "x", before[:-1], before.upper(), before.replace("4", "3")])
    else:
        owner[key] = rng.choice(NASTY)
    return _written(file, config, kind, f"{key}={owner[key]!r:.60}")


def _places(value: Any) -> list[tuple[Any, Any]]:
    found = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(item, dict | list):
            found += _places(item)
    return found


def _written(file: Path, config: Any, kind: str, what: str) -> Damage:
    file.write_text(json.dumps(config))
    return Damage(kind, what)


def config_entry(rng: random.Random, folder: Path) -> Damage:
    return _change_entry(rng, folder / "config.json", "config")


def quantization_entry(rng: random.Random, folder: Path) -> Damage | None:
    config = json.loads((folder / "config.json").read_text())
    entry = config.get("quantization_config")
    if entry is None:
        return None
    owner, key = rng.choice(_places(entry))
    if rng.random() < 0.3:
        del owner[key]
        return _written(folder / "config.json", config, "quantization", f"{key} is gone")
    schemes = ["w4a16g64", "w3a16g32", "w4a16g32asym", "w4a8g32", "w4", "w4a16g32-kv4", "", "w99a16"]
    owner[key] = rng.choice([*NASTY, "9.9.9", *schemes, ["lm_head", "(a+)+$"], ["q_proj"], ["lm_head", "nothing"]])
    other = key == "scheme" and owner[key] == "w4a8g32"
    kind = "scheme of activations" if other else "quantization"
    return _written(folder / "config.json", config, kind, f"{key}={owner[key]!r:.60}")


def config_new_entry(rng: random.Random, folder: Path) -> Damage:
    config = json.loads((folder / "config.json").read_text())
    names = "transformers_weights attn_implementation auto_map num_hidden_layers text_config torch_dtype"
    name, code = rng.choice(names.split()), {"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"}
    config[name] = rng.choice([*NASTY, "model.safetensors", "a/b", code])
    kind = "hyperparameter" if name in HYPERPARAMETERS else "config"
    return _written(folder / "config.json", config, kind, f"{name}={config[name]!r:.60}")


def _spoilt(rng: random.Random, file: Path, kind: str) -> Damage:
    data = file.read_bytes()
    what = rng.choice(["null", "[]", "3", "{", "", "cut", "deep", "digits", "bytes"])
    cut = data[: rng.randrange(len(data))]
    texts = {"cut": cut, "deep": b"[" * 200_000, "digits": b'{"a": ' + b"9" * 6000 + b"}", "bytes": b"\xff\xfe\0"}
    file.write_bytes(texts.get(what, what.encode()))
    return Damage(f"{kind}: spoilt", what)


def config_spoilt(rng: random.Random, folder: Path) -> Damage:
    return _spoilt(rng, folder / "config.json", "config")


def config_deep(rng: random.Random, folder: Path) -> Damage:
    config = json.loads((folder / "config.json").read_text())
    value: Any = 1
    for _ in range(rng.choice([70, 500])):
        value = {"a": value} if rng.random() < 0.5 else [value]
    config[rng.choice(list(config))] = value
    return _written(folder / "config.json", config, "config: deep", "")


# ---- the index


def index_entry(rng: random.Random, folder: Path) -> Damage | None:
    file = folder / "model.safetensors.index.json"
    if not file.exists():
        return None
    index = json.loads(file.read_text())
    places = index["weight_map"]
    name, files = rng.choice(list(places)), sorted(set(places.values()))
    what = rng.choice(["gone", "new", "moved", "outside", "absent", "number", "all outside", "map"])
    if what == "gone":
        del places[name]
    elif what == "all outside":
        shutil.copytree(folder, folder.parent / "elsewhere", dirs_exist_ok=True)
        index["weight_map"] = {key: f"../elsewhere/{item}" for key, item in places.items()}
    elif what == "map":
        index["weight_map"] = rng.choice(NASTY)
    else:
        new = {
            "new": (f"{name}x", files[0]),
            "moved": (name, next((item for item in files if item != places[name]), files[0])),
            "outside": (name, f"../{folder.name}/{places[name]}"),
            "absent": (name, "model-00009-of-00009.safetensors"),
            "number": (name, 3),
        }
        places |= [new[what]]
    # A tensor missing from the index is still in its file, and files decide.
    return _written(file, index, f"index: {what}", name)


def index_spoilt(rng: random.Random, folder: Path) -> Damage | None:
    file = folder / "model.safetensors.index.json"
    return _spoilt(rng, file, "index") if file.exists() else None


# ---- headers and tensors


def _weights(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def _read(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _write(file: Path, header: dict[str, Any] | str, data: bytes) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _names(header: dict[str, Any]) -> list[str]:
    return [name for name in header if name != "__metadata__"]


def header_entry(rng: random.Random, folder: Path) -> Damage:
    file = _weights(rng, folder)
    header, data = _read(file)
    name = rng.choice(_names(header))
    entry = header[name]
    what = rng.choice(["renamed", "swapped", "dtype", "shape", "offsets", "field", "name"])
    begin, end = entry["data_offsets"]
    if what == "renamed":
        header[rng.choice([f"{name}x", name.replace("0", "1"), name.replace("0", "7"), "\x1b[31mx"])] = header.pop(name)
    elif what == "swapped":
        other = rng.choice(_names(header))
        header[name], header[other] = header[other], header[name]
        alike = (entry["dtype"], entry["shape"]) == (header[name]["dtype"], header[name]["shape"])
        what = "value" if alike else what
    elif what == "dtype":
        widths = (("F32", "I32", "U32"), ("F64", "I64", "U64"), ("F16", "BF16", "I16"), ("U8", "I8", "BOOL", "F8_E4M3"))
        before = entry["dtype"]
        entry["dtype"] = rng.choice([*next(group for group in widths if entry["dtype"] in group), "Q4", 3, None])
        what = "value" if {before, entry["dtype"]} <= {"F16", "BF16"} else what
    elif what == "shape":
        shape = entry["shape"]
        entry["shape"] = rng.choice([shape[::-1], [*shape, 1], [1, *shape], [-1], "x", None, []])
    elif what == "offsets":
        entry["data_offsets"] = rng.choice([[begin + 4, end + 4], [end, begin], [0, 2**63], [begin], None, [1.5, 2.5]])
    elif what == "field":
        entry.pop(rng.choice(list(entry)))
    else:
        header["__metadata__"] = rng.choice([{"format": "tf"}, {"format": 3}, [], "x", None])
    kind = "tensor: another value" if what == "value" else f"header: {what}"
    return _save(file, header, data, kind, name)


def _save(file: Path, header: Any, data: bytes, kind: str, what: str) -> Damage:
    _write(file, header, data)
    return Damage(kind, what)


def header_tensors(rng: random.Random, folder: Path) -> Damage:
    file = _weights(rng, folder)
    header, data = _read(file)
    name = rng.choice(_names(header))
    what = rng.choice(["gone", "surplus", "twice", "hole", "many"])
    if what == "gone":
        begin, end = header.pop(name)["data_offsets"]
        for entry in header.values():
            offsets = entry.get("data_offsets", [0, 0])
            if offsets[0] >= end:
                entry["data_offsets"] = [offset - (end - begin) for offset in offsets]
        kind = "header: an empty tensor is gone" if begin == end else "header: gone"
        return _save(file, header, data[:begin] + data[end:], kind, name)
    text: dict[str, Any] | str = header
    if what == "surplus":
        name = rng.choice(["extra", f"{name}_extra", "model.layers.7.mlp.up_proj.weight_packed", "lm_head.bias"])
        header[name] = {"dtype": "F32", "shape": [2], "data_offsets": [len(data), len(data) + 8]}
        data += b"\0" * 8
    elif what == "twice":
        text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    elif what == "many":
        entry = {"dtype": "U8", "shape": [0], "data_offsets": [len(data), len(data)]}
        header |= {f"x{i}": entry for i in range(20_000)}
    else:
        del header[name]
    return _save(file, text, data, f"header: {what}", name)


def header_spoilt(rng: random.Random, folder: Path) -> Damage:
    file = _weights(rng, folder)
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    what = rng.choice(["cut", "longer", "length", "byte"])
    if what == "cut":
        del data[rng.randrange(len(data)) :]
    elif what == "longer":
        data += b"\0" * rng.choice([1, 8, 4096])
    elif what == "length":
        data[:8] = struct.pack("<Q", rng.choice([0, 1, length - 1, length + 1, 2**40, 2**64 - 1]))
    else:
        data[8 + rng.randrange(length)] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return Damage(f"header: {what}", "")


def tensor_values(rng: random.Random, folder: Path) -> Damage:
    file = _weights(rng, folder)
    header, data = _read(file)
    whole = {name: header[name]["data_offsets"] for name in _names(header)}
    name, (begin, end) = rng.choice([(name, (first, last)) for name, (first, last) in whole.items() if last > first])
    raw = bytearray(data)
    place = rng.randrange(begin, end)
    if header[name]["dtype"] in ("F32", "F16", "BF16") and rng.random() < 0.6:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[header[name]["dtype"]]
        value = torch.tensor([rng.choice([float("nan"), float("inf"), float("-inf")])], dtype=dtype)
        width = dtype.itemsize
        place -= (place - begin) % width
        raw[place : place + width] = value.view(torch.uint8).numpy().tobytes()
        return _save(file, header, bytes(raw), "tensor: not finite", name)
    if name.endswith("weight_indices"):
        raw[begin:end] = bytes(end - begin)  # every pair is (0, 0)
        return _save(file, header, bytes(raw), "tensor: one place twice", name)
    raw[place] ^= 1 << rng.randrange(8)
    kind = "tensor: another shape" if name.endswith("weight_shape") else "tensor: another value"
    return _save(file, header, bytes(raw), kind, name)


# ---- the tokenizer


def tokenizer_file(rng: random.Random, folder: Path) -> Damage | None:
    file = rng.choice([folder / "tokenizer.json", folder / "tokenizer_config.json"])
    if not file.exists():
        return None
    if rng.random() < 0.3:
        damage = _spoilt(rng, file, "tokenizer")
    elif rng.random() < 0.1:
        file.unlink()
        damage = Damage("", f"{file.name} is gone")
    else:
        damage = _change_entry(rng, file, "tokenizer")
    return Damage("tokenizer", f"{file.name} {damage.what}")


# ---- GGUF


GGUF_WORDS = 3 + 256 + 2
"""The vocabulary of ``describe_gguf``."""


def describe_gguf(
    writer: Any, context: int, hidden: int, ffn: int, key_heads: int, epsilon: float, theta: float
) -> None:
    """Write the settings of a model of one block and four heads, and a byte tokenizer with two merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", *alphabet, "".join(alphabet[:2]), "".join(alphabet[2:4])]
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(4)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges([" ".join(alphabet[:2]), " ".join(alphabet[2:4])])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def finish_gguf(writer: Any) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_gguf(
    file: Path,
    hidden: int = 32,
    key_heads: int = 4,
    kinds: Mapping[str, str] | None = None,
    rope: Mapping[str, float | str | np.ndarray] | None = None,
) -> Path:
    """A llama of one block in float16 with a byte tokenizer.

    kinds: block types of tensors that are quantized instead, at random.  rope: RoPE scaling metadata and tensors.
    """
    import gguf

    writer, rng = gguf.GGUFWriter(file, "llama"), np.random.default_rng(3)
    ffn, heads = 2 * hidden, 4
    describe_gguf(writer, 64, hidden, ffn, key_heads, 1e-5, 10000.0)
    shapes = {"token_embd": (GGUF_WORDS, hidden), "output": (GGUF_WORDS, hidden)}
    narrow = hidden // heads * key_heads
    shapes |= {f"blk.0.attn_{part}": (hidden, hidden) for part in ("q", "output")}
    shapes |= {f"blk.0.attn_{part}": (narrow, hidden) for part in ("k", "v")}
    shapes |= {"blk.0.ffn_gate": (ffn, hidden), "blk.0.ffn_up": (ffn, hidden), "blk.0.ffn_down": (hidden, ffn)}
    norms = ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")
    for name, shape in shapes.items():
        if kind := (kinds or {}).get(name):
            writer.add_tensor(f"{name}.weight", random_blocks(kind, *shape), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float16))
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    for name, value in (rope or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_float32(name, value)
    finish_gguf(writer)
    return file


# Positions of a block's half-precision numbers; all other bytes may be anything.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (), "IQ3_S": (0,),
}  # fmt: skip


def random_blocks(kind: str, n: int, k: int) -> np.ndarray:
    """Random n x k matrix in quantized blocks with sensible scales, uint8 [n, bytes per row]."""
    import gguf

    random = np.random.default_rng(len(kind) + n + k)
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = random.integers(0, 256, (n, k // weights, size), dtype=np.uint8)
    for place in _HALVES[kind]:
        scales = random.normal(0, 0.002, data.shape[:2]).astype(np.float16)
        data[..., place : place + 2] = scales[..., None].view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = random.integers(110, 130, data.shape[:2])
    if kind == "TQ2_0":
        data[..., :64] &= 0b10101010  # pairs of 3 are not ternary digits
    return data.reshape(n, -1)


def damage_gguf(rng: random.Random, file: Path) -> Damage:
    """Change one thing in a GGUF file, in place."""
    data = bytearray(file.read_bytes())
    header = data.index(b"output_norm.weight") + 64
    what = rng.choice(["byte", "count", "cut", "tensor", "entry", "blocks", "not finite"])
    kind = f"gguf: {what}"
    if what == "byte":
        # Most of the header is the vocabulary.
        place = rng.choice([rng.randrange(4, 600), rng.randrange(header - 800, header)])
        data[place] ^= 1 << rng.randrange(8)
        kind = "gguf: a byte"
    elif what == "count":
        data[8:24] = struct.pack("<QQ", *rng.choice([(12, 2**40), (2**40, 17), (2**63, 1), (0, 17), (12, 3)]))
    elif what == "cut":
        del data[rng.randrange(len(data)) :]
    elif what == "tensor":
        name = rng.choice([b"ffn_up", b"attn_q.", b"ffn_norm", b"token_embd", b"output_norm", b"attn_output"])
        place = data.index(name, 600)
        data[place : place + 2] = b"zz"
    elif what == "entry":
        names = b"llama.block_count", b"llama.embedding_length", b"general.architecture", b"llama.feed_forward"
        place = data.index(rng.choice(names))
        data[place + 8 : place + 10] = b"zz"
        kind = "gguf: an entry is renamed"
    elif what == "blocks":
        place = data.index(b"llama.block_count") + len(b"llama.block_count") + 4
        data[place : place + 4] = struct.pack("<I", rng.choice([0, 2, 12, 13, 10_000, 2**31, 2**32 - 1]))
    else:
        data[-2:] = b"\xff\xff"
        data[-200:-196] = b"\xff\xff\xff\xff"
    file.write_bytes(data)
    return Damage(kind, "")


MUTATIONS: dict[str, list[Callable[[random.Random, Path], Damage | None]]] = {
    "config": [*[config_entry] * 3, *[quantization_entry] * 2, config_new_entry, config_spoilt, config_deep],
    "index": [index_entry, index_entry, index_spoilt],
    "header": [header_entry, header_entry, header_tensors, header_spoilt],
    "tensors": [tensor_values],
    "tokenizer": [tokenizer_file],
}
