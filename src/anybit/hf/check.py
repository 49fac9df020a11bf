"""Check a whole model folder before a program loads it that checks less than ``load_model`` does (vLLM)."""

from pathlib import Path

from torch import nn

from anybit.checkpoints.configuration import METHOD, method_of
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats.translate import FolderTranslation
from anybit.checkpoints.verify import check_model
from anybit.hf.transformers import AnyBitConfig, AnyBitQuantizer
from anybit.layers.linear import QuantLinear
from anybit.models.modules import skeleton


def check_folder(path: Path, trust_remote_code: bool = False) -> None:
    """Check a folder's configuration, index, headers, and the values of everything but its quantized layers.

    Values of layers that are or will be quantized are checked by their loader (``verify.check_values``). A folder in a
    format that anybit cannot read is only checked for consistent headers. Raises CheckpointError, naming file and
    tensor.
    """
    folder = Folder(path, trust_remote_code)
    foreign = FolderTranslation.of(folder)
    if foreign is not None:
        foreign.check(skeleton(path, trust_remote_code))
        for name in foreign.plain:
            foreign.read_plain(name)  # raises for NaN or infinity
        return
    if method_of(folder.config) not in (None, METHOD):
        return
    model = skeleton(path, trust_remote_code)
    if folder.quantization is None:
        check_model(model, folder.entries, path)
    else:
        config = AnyBitConfig.from_dict(folder.config["quantization_config"])
        files = sorted({str(entry.file) for entry in folder.entries.values()})
        AnyBitQuantizer(config, pre_quantized=True)._process_model_before_weight_loading(model, files)
    head = model.get_output_embeddings()
    kinds = nn.Linear if folder.quantization is None else QuantLinear
    layers = {name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head}
    for name in folder.entries:
        if name.rpartition(".")[0] not in layers or name.endswith(".bias"):
            folder.read(name, finite=True)
