"""The folder that ``anybit serve`` passes to vLLM (the model's, or one made for a GGUF file), and its kernels."""

import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybit.checkpoints.configuration import refuse_quantized
from anybit.checkpoints.folder import Folder, read_json
from anybit.checkpoints.formats import format_of
from anybit.checkpoints.formats.gguf_file import NotNative, open_gguf
from anybit.checkpoints.formats.translate import FolderTranslation, linear_shapes
from anybit.checkpoints.scratch import Scratch
from anybit.checkpoints.sidecars import with_quantization
from anybit.checkpoints.source import is_gguf, local_folder
from anybit.errors import CheckpointError
from anybit.models.modules import skeleton

if TYPE_CHECKING:
    from anybit.vllm.serving import Server


@contextlib.contextmanager
def vllm_folder(server: "Server") -> Iterator[tuple[Path, list[str]]]:
    """(folder for vLLM to serve, extra arguments for vLLM).

    For a GGUF file: a temporary folder of config, tokenizer and a link to the file, which the plug-in reads itself.
    Other tools' folders run on anybit's kernels if it can read them, otherwise on vLLM's, with a warning that says why.
    """
    if server.scheme is None and is_gguf(server.model):
        file = Path(server.model).expanduser()
        try:
            source, tokenizer, empty = open_gguf(file)
        except NotNative as reason:
            warnings.warn(f"{file} is dequantized to 16-bit floats: {reason}", stacklevel=2)
        else:
            source.check(empty)
            with Scratch(Path(tempfile.gettempdir())) as folder:
                for part in (empty.config, tokenizer):
                    part.save_pretrained(folder)
                config = read_json(folder / "config.json")
                kept = sorted(set(linear_shapes(empty)) - set(source.layers))
                words = {"dtype": "float16", "quantization_config": source.configuration(kept)}
                (folder / "config.json").write_text(json.dumps(config | words), encoding="utf-8")
                (folder / "model.gguf").symlink_to(file.resolve())
                yield folder, []
            return
    with local_folder(server.model, server.trust_remote_code) as path:
        config = with_quantization(read_json(path / "config.json"), path, read_json)
        if server.scheme is not None:
            refuse_quantized(config, server.model)
        chosen = any(word.startswith(("--quantization", "-q")) for word in server.others)
        yield path, ["--quantization", "anybit"] if not chosen and _reads(path, config, server) else []


def _reads(path: Path, config: dict[str, Any], server: "Server") -> bool:
    """Whether a folder is another tool's and anybit can read it; warns if it cannot."""
    if format_of(config) is None:
        return False
    try:
        source = FolderTranslation.of(Folder(path, server.trust_remote_code))
        assert source is not None
        source.check(skeleton(path, server.trust_remote_code))
    except CheckpointError as error:
        warnings.warn(f"vLLM's own kernels run {server.model}, since anybit cannot: {error}", stacklevel=3)
        return False
    return True
