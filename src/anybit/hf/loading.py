"""Load a model from a folder, the hub or a GGUF file: already quantized, quantized while loading, or unquantized."""

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers.auto import AutoHfQuantizer

from anybit.checkpoints.configuration import METHOD, method_of, refuse_quantized, unreadable
from anybit.checkpoints.folder import Folder, without_tokenizer
from anybit.checkpoints.formats.translate import FolderTranslation
from anybit.checkpoints.gguf import gguf_scheme
from anybit.checkpoints.source import is_gguf, local_folder, refuse_incomplete
from anybit.checkpoints.verify import check_model
from anybit.device import checked_device
from anybit.errors import AnyBitError, CheckpointError, KernelError, SchemeError, dtype_name, one_line
from anybit.hf.foreign import load_gguf, load_translated, without_kernel
from anybit.hf.transformers import AnyBitConfig, check_finite
from anybit.layers.linear import QuantLinear
from anybit.models.modules import auto_class, last_position, positions_of, skeleton
from anybit.ops import backends
from anybit.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run. scheme: None unless anybit runs quantized layers of it.  schemes: of each, as text."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    scheme: Scheme | None
    name: str
    schemes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, scheme: Scheme | None, source: str | Path
    ) -> "Loaded":
        """A model as it was loaded from a source."""
        layers = (module for module in model.modules() if isinstance(module, QuantLinear))
        return cls(model.eval(), tokenizer, scheme, str(source), [str(layer.scheme) for layer in layers])

    @property
    def positions(self) -> int | None:
        """The model's context length; None where its configuration does not fix one.

        ALiBi has no last position; with RoPE scaling the configured number may be the one before or after scaling.
        """
        return positions_of(self.model.config)

    @property
    def positions_end(self) -> bool:
        """Whether the model cannot go past its last position: it keeps a table of positions (RoPE models do not)."""
        return last_position(self.model.config) is not None


def load_model(
    source: str | Path,
    scheme: str | Scheme | None = None,
    *,
    backend: str | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    modules_to_not_convert: list[str] | None = None,
    overrides: Mapping[str, str | Scheme] | None = None,
    trust_remote_code: bool = False,
    dequantize: bool = False,
    width: int | None = None,
) -> Loaded:
    """Load a causal language model and its tokenizer.

    scheme: quantize to this scheme while loading; None loads the model as stored.
    device: by default a GPU if there is one.
    dtype: of everything unquantized; by default float32 on a CPU (whose 16-bit arithmetic is slow), else the model's. A
        quantized model stored in float32 is loaded onto a GPU as bfloat16, as kernels take 16-bit floats; this warns.
    overrides: per-layer schemes, on top of ``scheme`` (see ``AnyBitConfig``).
    trust_remote_code: run a model's own Python files; without it nothing in a folder is executed.
    dequantize: turn quantized layers into floats, by default bfloat16 (float32 on a CPU), for codes without a kernel.
    width: of a nested model, the bits of its weights to take.
    Raises CheckpointError, naming file and tensor, for a corrupt, incomplete or non-finite checkpoint; LayerError for a
    layer that the scheme does not fit; KernelError for a backend that is unknown, cannot run the layers, or is given
    for an unquantized model; SchemeError for an invalid scheme, or overrides without one.
    """
    device = checked_device(device)
    wanted = dtype or (torch.float32 if device == "cpu" else "auto")
    if backend is not None and backend not in backends:
        raise KernelError(f"backend {backend!r} is unknown; there are {', '.join(backends)}")
    if device != "cpu" and importlib.util.find_spec("accelerate") is None:
        raise KernelError(f"transformers loads a model onto {device} with accelerate: pip install 'anybit[cuda]'")
    if overrides and scheme is None:
        raise SchemeError("overrides are exceptions to a scheme: pass the scheme to quantize to, too")
    if dequantize:
        if scheme is not None or backend is not None:
            raise KernelError("dequantize leaves no layer quantized: leave out the scheme and the backend")
        return _dequantized(source, device, dtype, trust_remote_code, width)
    if scheme is None and width is None and is_gguf(source):
        native = load_gguf(Path(source).expanduser(), wanted, None if device == "cpu" else device, backend)
        if native is not None:
            return Loaded.of(*native, source)
    with local_folder(source, trust_remote_code, width) as path:
        folder = Folder(path, trust_remote_code)
        # Built first, so that a configuration that transformers cannot build raises an error of its own.
        empty = skeleton(path, trust_remote_code)
        method = method_of(folder.config)
        foreign = FolderTranslation.of(folder)
        if method is None:
            check_model(empty, folder.entries, path)
        elif method != METHOD and foreign is None:
            entry = folder.config["quantization_config"]  # whose quant_method may be anything
            if not AutoHfQuantizer.supports_quant_method({**entry, "quant_method": str(entry.get("quant_method", ""))}):
                raise unreadable(folder.config, source, "it does not know the method")
        described = foreign or folder.quantization
        stored = None if described is None else described.scheme
        quantized = scheme is not None or stored is not None
        if backend is not None and not quantized:
            raise KernelError(
                f"backend {backend!r} runs quantized layers, and {source} has none: leave the backend out, or give a "
                "scheme to quantize to while loading"
            )
        if wanted == "auto" and quantized and not (backend or "").startswith("reference"):
            wanted = folder.kernel_dtype
            if wanted != folder.dtype:
                here, there = (dtype_name(kind) for kind in (folder.dtype, wanted))
                warnings.warn(
                    f"{source} is stored in {here}; kernels take float16 or bfloat16, so it is loaded as {there}",
                    stacklevel=2,
                )
        arguments: dict[str, object] = {"device_map": device} if device != "cpu" else {}
        if scheme is not None:
            refuse_quantized(folder.config, str(source))
            config = AnyBitConfig(scheme, modules_to_not_convert, backend, overrides=overrides)
            arguments["quantization_config"] = config
        elif stored is not None and backend is not None and foreign is None:
            # transformers ignores a second quantization_config, so the backend goes into the checkpoint's own.
            arguments["config"] = own = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            entry = own.quantization_config
            (entry if entry["quant_method"] == METHOD else entry[METHOD])["backend"] = backend
        try:
            if foreign is not None:
                kind = folder.kernel_dtype if isinstance(wanted, str) else wanted
                model, found = load_translated(foreign, empty, kind, None if device == "cpu" else device, backend)
            else:
                model, found = auto_class(empty.config).from_pretrained(
                    path, dtype=wanted, output_loading_info=True, trust_remote_code=trust_remote_code, **arguments
                )
        except KernelError as error:
            raise error if foreign is None else without_kernel(error) from None
        except (AnyBitError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a damaged folder can make the libraries below raise anything
            _refuse_not_finite(folder)  # transformers hides the reason when quantizing a weight fails
            if method not in (None, METHOD):
                raise unreadable(folder.config, source, one_line(error)) from error
            raise CheckpointError(f"{path} cannot be loaded: {one_line(error)}") from error
        refuse_incomplete(path, found)
        try:
            check_finite(model)
        except CheckpointError:
            _refuse_not_finite(folder)  # which names the file, too
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
            tokenizer("a")  # some bad settings fail only at the first text
        except MemoryError:
            raise
        except Exception as error:
            raise without_tokenizer(path, error) from error
    parsed = stored if scheme is None else Scheme.parse(scheme)
    return Loaded.of(model, tokenizer, parsed, source)


def _dequantized(
    source: str | Path, device: str, dtype: torch.dtype | None, trust_remote_code: bool, width: int | None
) -> Loaded:
    """Load with all quantized layers turned into floats: layer by layer on the CPU, then moved to ``device``."""
    kind = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    backend = None if stored_scheme(source) is None else "reference-packed"
    loaded = load_model(
        source, backend=backend, device="cpu", dtype=kind, trust_remote_code=trust_remote_code, width=width
    )
    if loaded.scheme is not None:
        loaded.model.dequantize(dtype=kind)
    return replace(loaded, model=loaded.model.to(device), scheme=None, schemes=[])


def load(
    source: str | Path,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    trust_remote_code: bool = False,
    dequantize: bool = False,
    width: int | None = None,
) -> PreTrainedModel:
    """Load a transformers model from any format anybit reads: its own folders, GPTQ, AWQ, auto-round, HQQ, GGUF, ...

    Layers keep their codes and run on anybit's kernels. Unlike transformers' ``from_pretrained``, this does not need
    the packages of the tool that wrote the checkpoint. Arguments and errors are those of ``load_model``, which also
    returns the tokenizer.
    """
    return load_model(
        source, backend=backend, device=device, dtype=dtype, trust_remote_code=trust_remote_code,
        dequantize=dequantize, width=width,
    ).model  # fmt: skip


def stored_scheme(source: str | Path) -> Scheme | None:
    """The scheme of most of a model's layers, read from its headers; None for an unquantized model."""
    if is_gguf(source):
        return gguf_scheme(Path(source).expanduser())
    with local_folder(source) as path:
        folder = Folder(path)
        found = folder.quantization or FolderTranslation.of(folder)
        return None if found is None else found.scheme


def _refuse_not_finite(folder: Folder) -> None:
    """Raise CheckpointError for the first tensor of a checkpoint with NaN or infinity, if there is one."""
    for name in folder.entries:
        folder.read(name, finite=True)
