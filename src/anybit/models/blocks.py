"""The transformer blocks of a model, and the weights of their linear layers."""

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from anybit.errors import CalibrationError


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """(name, list) of a model's transformer blocks: the ModuleList of its decoder with the most parameters.

    A vision tower, which is not quantized, may be larger than the decoder. Lists inside of others are parts of blocks.
    Raises CalibrationError if there is no list.
    """
    find = getattr(model, "get_decoder", None)
    decoder = find() if callable(find) else None
    inside = set((decoder if isinstance(decoder, nn.Module) else model).modules())
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and module in inside
            and not name.startswith(tuple(f"{x}." for x in lists))
        ):
            lists[name] = module
    alike = [item for item in lists.items() if len({type(block) for block in item[1]}) == 1]
    if not alike:
        raise CalibrationError(f"{type(model).__name__} has no list of blocks to calibrate one by one: use method rtn")
    return max(alike, key=lambda item: sum(p.numel() for p in item[1].parameters()))


def linear_modules(block: nn.Module, prefix: str, names: set[str]) -> dict[str, nn.Module]:
    """The linear layers of a block that are in ``names``, by full name."""
    return {
        f"{prefix}.{name}": module
        for name, module in block.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and f"{prefix}.{name}" in names
    }


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear layer as [N, K]; Conv1D stores [K, N]."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    data: Tensor = weight.data
    return data.T if isinstance(module, Conv1D) else data


def set_weight(module: nn.Module, weight: Tensor) -> None:
    """Set a linear layer's weight from [N, K], keeping its dtype."""
    own = module.weight
    assert isinstance(own, Tensor)
    own.data = (weight.T if isinstance(module, Conv1D) else weight).to(own).contiguous()
