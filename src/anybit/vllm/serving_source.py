"""The folder that ``anybit serve`` passes to vLLM (the model's, or one made for a GGUF file), and its kernels."""

import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from anybit.checkpoints.configuration import METHOD, Quantization, method_of, refuse_quantized
from anybit.checkpoints.folder import read_json
from anybit.checkpoints.formats import format_of
from anybit.checkpoints.formats.fp4 import MXFP4
from anybit.checkpoints.formats.gguf_file import NotNative, open_gguf
from anybit.checkpoints.scratch import Scratch
from anybit.checkpoints.sidecars import with_quantization
from anybit.checkpoints.source import is_gguf, local_folder
from anybit.errors import CheckpointError
from anybit.hf.check import check_folder
from anybit.models.experts import HubNames
from anybit.vllm.server import Server, values_of


@contextlib.contextmanager
def vllm_folder(server: Server) -> Iterator[tuple[Path, list[str]]]:
    """(folder for vLLM to serve, extra arguments for vLLM).

    For a GGUF file: a temporary folder of config, tokenizer and a link to the file, which the plug-in reads itself. For
    a width of a nested model: a temporary folder with that slice.
    Other tools' folders run on anybit's kernels if it can read them, otherwise on vLLM's, with a warning that says why.
    """
    if server.scheme is None and server.width is None and is_gguf(server.model):
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
                words = {
                    "architectures": [type(empty).__name__],
                    "dtype": "float16",
                    "quantization_config": source.quantization(empty).renamed(HubNames.of(empty).hub).entry(),
                }
                (folder / "config.json").write_text(json.dumps(config | words), encoding="utf-8")
                (folder / "model.gguf").symlink_to(file.resolve())
                yield folder, []
            return
    with local_folder(server.model, server.trust_remote_code, server.width) as path:
        config = with_quantization(read_json(path / "config.json"), path, read_json)
        if server.scheme is not None:
            refuse_quantized(config, server.model)
        yield path, _checked(path, config, server)


def _checked(path: Path, config: dict[str, object], server: Server) -> list[str]:
    """Check a folder. Returns the arguments for vLLM by which anybit's kernels run another tool's."""
    chosen = (values_of("quantization", server.others) or values_of("q", server.others))[-1:]
    format, method = format_of(config), method_of(config)
    other = Quantization.of(config) is None and format not in (None, MXFP4)  # gpt-oss: vLLM's own kernels
    if not chosen and server.scheme is None and (method is None or format is MXFP4):
        held = "in MXFP4" if method else "not quantized (--scheme w4a16g128 quantizes it while it is loaded)"
        warnings.warn(f"vLLM's own kernels run {server.model}, which is {held}", stacklevel=2)
    if other and chosen not in ([], [METHOD]):
        return []
    try:
        check_folder(path, server.trust_remote_code)
    except CheckpointError as error:
        if chosen or not other:
            raise
        warnings.warn(f"vLLM's own kernels run {server.model}, since anybit cannot: {error}", stacklevel=2)
        return []
    return ["--quantization", METHOD] if other and not chosen else []
