"""Resolve a model (a folder, a hub name, a GGUF file) to a folder of safetensors."""

import importlib.util
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from anybit.checkpoints.folder import Folder, path_of, read_json, refuse_adapter
from anybit.checkpoints.formats.compressed_tensors import FORMAT, unmasked
from anybit.checkpoints.formats.stored import StoredLayer
from anybit.checkpoints.gguf import read_gguf_header
from anybit.checkpoints.gguf_config import config_of, linked_alone, tokenizer_of
from anybit.checkpoints.scratch import Scratch
from anybit.checkpoints.slicing import write_slice
from anybit.checkpoints.writing import rewrite
from anybit.errors import CheckpointError, counted

# Files to download; pickles and other frameworks' weights are not even fetched.
_FETCHED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.md", "LICENSE*", "NOTICE*")
_COPIES = "*/*.safetensors"
"""The same weights for other programs, in folders of their own (gpt-oss: original, metal)."""
# Tensors of RoPE factors, which models compute themselves.
_FREQUENCIES = re.compile(r"rope_(freqs|factors)")


@contextmanager
def local_folder(model: str | Path, trust_remote_code: bool = False, width: int | None = None) -> Iterator[Path]:
    """A folder with config.json and safetensors for a model; raises CheckpointError if there is none.

    model: a folder, the name of a model on the Hugging Face hub, or a GGUF file. GGUF files are dequantized to 16-bit
    floats, and unquantized compressed-tensors models with 2:4 bitmasks decompressed, into a temporary folder that lives
    as long as the context. Other folders are used in place.
    trust_remote_code: also fetch a hub model's Python files.
    width: of a nested model, the bits of its weights to take: that slice goes into a temporary folder, too.
    """
    path = _place(model)
    if path.is_file():
        if width is not None:
            raise CheckpointError(f"{model} is a GGUF file, which has one width: leave {width} out")
        with Scratch(Path(tempfile.gettempdir())) as folder:
            dequantize_gguf(path, folder)
            yield folder
        return
    if not path.is_dir():
        path = from_hub(str(model), trust_remote_code)
    refuse_adapter(path)
    if width is None and not _is_masked(path):
        yield path
        return
    source = Folder(path, trust_remote_code)
    if width is not None and source.quantization is not None and width == source.quantization.scheme.weights.bits:
        yield path
        return
    with Scratch(Path(tempfile.gettempdir())) as folder:
        if width is None:
            unmask(source, folder)
        else:
            write_slice(source, width, folder)
        yield folder


def _place(model: str | Path) -> Path:
    """Where a model may be. Raises CheckpointError for an empty name, which Path takes for the current directory."""
    if isinstance(model, str) and not model.strip():
        raise CheckpointError(
            "the model's name is empty: write a folder, a GGUF file or a hub name; . is this directory"
        )
    return path_of(model, "a model's source").expanduser()


def is_gguf(model: str | Path) -> bool:
    """Whether a model is a file, which has to be GGUF, and not a folder or hub name."""
    return _place(model).is_file()


def _is_masked(path: Path) -> bool:
    """Whether a folder holds unquantized weights compressed by 2:4 bitmasks (compressed-tensors' sparse-24-bitmask)."""
    try:
        entry = read_json(path / "config.json")["quantization_config"]
        masked = entry["sparsity_config"]["format"] == "sparse-24-bitmask"
        plain = not entry.get("config_groups") and not FORMAT.matches(entry)
        return bool(masked and plain and entry["quant_method"] == "compressed-tensors")
    except (CheckpointError, KeyError, TypeError, AttributeError):  # reported by later checks
        return False


def unmask(source: Folder, folder: Path) -> None:
    """Write a bitmask-compressed model into a folder with dense weights.

    Raises CheckpointError, naming the layer, for a bitmask that does not keep two of every four inputs.
    """
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in sorted(source.entries):
            layer, _, part = name.rpartition(".")
            if part == "bitmask":
                yield f"{layer}.weight", unmasked(StoredLayer(source.entries, source.read, layer, {}))
            elif part not in ("compressed", "shape") or f"{layer}.bitmask" not in source.entries:
                yield name, source.read(name)

    rewrite(source, folder, config, tensors())


def dequantize_gguf(file: Path, folder: Path) -> None:
    """Write a GGUF file's model, as float16, and tokenizer into a folder. Needs the ``gguf`` extra.

    Raises CheckpointError for a file that lacks a tensor of its model, has one too many, or is otherwise corrupt.
    Files beside it are ignored.
    """
    header = read_gguf_header(file)
    if importlib.util.find_spec("accelerate") is None:
        raise CheckpointError(f"reading {file} needs accelerate: pip install 'anybit[gguf]'")
    import torch
    import transformers

    options: dict[str, object] = {"dtype": torch.float16, "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):
        # By default newer versions keep the file's quantization, which can be neither cast nor saved.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    alone = folder / "source"
    alone.mkdir()
    try:
        with linked_alone(file, alone):
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                alone, gguf_file=file.name, config=config_of(alone, file, header), trust_remote_code=False, **options
            )
            tokenizer = tokenizer_of(alone, file.name, header)
    finally:
        shutil.rmtree(alone)
    surplus = [key for key in found.get("unexpected_keys") or () if not _FREQUENCIES.search(str(key))]
    refuse_incomplete(file, found, surplus)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error


def refuse_incomplete(place: Path, found: Mapping[str, Iterable[object]], surplus: Collection[object] = ()) -> None:
    """Raise CheckpointError for missing, misshapen or surplus tensors, which transformers tolerates.

    found: its loading info.  surplus: tensors that the model has no place for.
    """
    for keys, what in (
        (found.get("missing_keys"), "has no tensor {}, which the model needs"),
        (found.get("mismatched_keys"), "has another shape for tensor {} than the model"),
        (surplus, "has tensor {}, which the model has no place for"),
    ):
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in keys or ())
        if names:
            raise CheckpointError(f"{place} {what.format(counted(names))}")


def config_folder(model: str, trust_remote_code: bool = False) -> Path:
    """A folder with a model's config.json; of a model on the hub nothing else is downloaded. Raises CheckpointError."""
    path = _place(model)
    if path.is_file():
        raise CheckpointError(f"{model} is a file: give the folder or the hub name of the model that it was made from")
    return path if path.is_dir() else from_hub(model, trust_remote_code, files=("config.json",))


def from_hub(
    name: str,
    trust_remote_code: bool = False,
    revision: str | None = None,
    cache: str | None = None,
    files: Sequence[str] = _FETCHED,
) -> Path:
    """The local folder of a model on the hub, downloaded if needed. Raises CheckpointError if that fails.

    revision: a branch or commit; None: the newest.  cache: the cache folder; None: Hugging Face's.  files: patterns.
    """
    parts = name.split("/")
    if len(parts) != 2 or not all(part and not part.startswith(".") for part in parts):
        raise CheckpointError(f"{name} is neither a folder, nor a GGUF file, nor a hub name such as 'owner/model'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = [*files, "*.py"] if trust_remote_code else list(files)
        where = {"revision": revision, "cache_dir": cache}
        path = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_COPIES, **where))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name} is not a local folder, and the hub does not serve it: {reason}") from error
    refuse_adapter(path)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{name} has no config.json on the hub: if it holds GGUF files, download one "
            f"(hf download {name} FILE.gguf --local-dir .) and give that file"
        )
    return path
