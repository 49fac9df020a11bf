"""Run a transformer's blocks one at a time: their inputs, and which linear layers share an input."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from anybit.checkpoints.scratch import Scratch
from anybit.errors import CalibrationError, one_line
from anybit.layers.experts import Experts

HESSIANS = 4 << 30
"""Bytes of the float32 Hessians of experts that are in memory at a time."""


class _Stop(Exception):  # noqa: N818  control flow, not an error
    """Raised by a hook to end a forward pass early."""


class Call(NamedTuple):
    """The arguments with which a model calls one of its blocks, except hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def to(self, device: torch.device) -> "Call":
        """The same call with its tensors on another device."""
        found: Call = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, self)
        return found


class Store:
    """Tensors by number (activations between blocks): in memory up to a budget, then in files of a folder.

    Files go into a scratch subfolder, so that runs may share the folder; it is removed by ``clear``, at the end of the
    store or, after a kill, by the next run.
    """

    def __init__(self, folder: Path | None = None, budget: int = 8 << 30) -> None:
        self._folder, self._budget = folder, budget
        self._held: dict[int, Tensor | Path] = {}
        self._scratch: Scratch | None = None

    def __setitem__(self, key: int, value: Tensor) -> None:
        value = value.detach()
        self._held.pop(key, None)
        held = sum(tensor.nbytes for tensor in self._held.values() if isinstance(tensor, Tensor))
        if self._folder is None or held + value.nbytes <= self._budget:
            self._held[key] = value
        else:
            self._held[key] = self._spilled(self._folder, key, value.cpu())

    def __getitem__(self, key: int) -> Tensor:
        held = self._held[key]
        found: Tensor = held if isinstance(held, Tensor) else torch.load(held, weights_only=True)
        return found

    def _spilled(self, folder: Path, key: int, value: Tensor) -> Path:
        try:
            if self._scratch is None:
                folder.mkdir(parents=True, exist_ok=True)
                self._scratch = Scratch(folder)
            torch.save(value, file := self._scratch.path / f"{key}.pt")
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if a disk is full
            raise CalibrationError(
                f"option spill: {value.nbytes} bytes of activations cannot be written into {folder} "
                f"({one_line(error)}): name a folder with more space, or use fewer tokens"
            ) from error
        return file

    def clear(self) -> None:
        """Remove all tensors and files."""
        self._held.clear()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None


class Examples(NamedTuple):
    """What a block is to learn, by batch: from inputs in the quantized model its outputs in the original."""

    inputs: Store
    outputs: Store
    calls: list[Call]


@torch.no_grad()
def first_inputs(
    model: nn.Module,
    blocks: nn.ModuleList,
    first: nn.Module,
    batches: Sequence[Tensor],
    keep: Callable[[int, Tensor], None],
) -> list[list[Call]]:
    """How each block is called, as calls[block][batch]; ``keep`` gets the first block's input for each batch.

    Blocks themselves do not run, except ``first``, a copy of the first, once on a few tokens, to see what it returns.
    Raises CalibrationError for a model that does not run through stand-ins of its blocks.
    """
    beside: list[int | None] = []  # values that a block returns in a tuple beside hidden states, or no tuple
    calls: list[list[Call]] = [[] for _ in blocks]

    def stub(index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not beside:
                found = first(*args, **kwargs)
                beside.append(len(found) - 1 if isinstance(found, tuple) else None)
                raise _Stop
            rest = dict(kwargs)
            x = args[0] if args else rest.pop("hidden_states")
            if index == 0:
                keep(len(calls[0]), x)
            calls[index].append(Call(args[1:], rest))
            if index == len(blocks) - 1:
                raise _Stop
            return x if beside[0] is None else (x, *[None] * beside[0])

        return forward

    try:
        for index, block in enumerate(blocks):
            block.forward = stub(index)
        for tokens in (batches[0][:1, :8], *batches):
            _run_until_stopped(model, tokens)
    finally:
        for block in blocks:
            del block.forward
    return calls


def _run_until_stopped(model: nn.Module, tokens: Tensor) -> None:
    """Run a model until a hook raises ``_Stop``. Raises CalibrationError if none does, or another error comes first."""
    why = "its forward pass does not reach all of its blocks"
    try:
        model(input_ids=tokens, use_cache=False)
    except _Stop:
        return
    except (ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        why = one_line(error)
    raise CalibrationError(
        f"{type(model).__name__} cannot be calibrated block by block ({why}): use method rtn, which needs no text"
    )


def unreached(layers: Collection[str], why: str = "") -> CalibrationError:
    """The error for layers without inputs in the calibration text: a model may use a layer's weight by itself."""
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    return CalibrationError(
        f"the calibration text never reaches {', '.join(sorted(layers))}{why}: leave such layers in 16 bits with "
        f"{' '.join(f'--keep {name}' for name in names)} (modules_to_not_convert={names}), and name there what else "
        "shall stay, such as lm_head"
    )


@contextmanager
def watching(modules: Mapping[str, nn.Module], look: Callable[[str, Tensor], None]) -> Iterator[None]:
    """A context in which ``look`` gets the names and inputs of modules, before these run."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args: look(name, args[0])

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_block(block: nn.Module, x: Tensor, call: Call) -> Tensor:
    """The output hidden states of a block."""
    out = block(x, *call.args, **call.kwargs)
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


@torch.no_grad()
def stages(
    block: nn.Module, linears: dict[str, nn.Module], x: Tensor, call: Call, optional: Collection[str] = ()
) -> list[list[str]]:
    """The linear layers in execution order, grouped by shared input. optional: those that may see no input."""
    found: list[list[str]] = []
    seen: list[Tensor] = []  # kept alive, so that no address is reused

    def record(name: str, own: Tensor) -> None:
        for stage, tensor in zip(found, seen, strict=True):
            if tensor.data_ptr() == own.data_ptr() and tensor.shape == own.shape:
                stage.append(name)
                return
        found.append([name])
        seen.append(own)

    with watching(linears, record):
        run_block(block, x, call)
    missing = linears.keys() - {name for stage in found for name in stage} - set(optional)
    if missing:
        raise unreached(missing)
    return found


def expert_stages(block: nn.Module, prefix: str, names: Collection[str]) -> list[list[list[str]]]:
    """The layers in ``names`` of a block's experts: runs of stages whose statistics are collected in one pass.

    A stage is the layers of one expert that share an input: gate and up, or down.  Statistics of a run fit HESSIANS.
    """
    found = []
    for name, module in block.named_modules():
        if not isinstance(module, Experts):
            continue
        for own, k in ((module.names[:2], module.hidden_dim), (module.names[2:], module.intermediate_dim)):
            every = [[f"{prefix}.{name}.{number}.{layer}" for layer in own] for number in range(len(module))]
            every = [kept for stage in every if (kept := [layer for layer in stage if layer in names])]
            size = max(HESSIANS // (4 * k * k), 1)
            found += [every[i : i + size] for i in range(0, len(every), size)]
    return found


@torch.no_grad()
def inputs_of(block: nn.Module, modules: Mapping[str, nn.Module], x: Tensor, call: Call) -> dict[str, Tensor]:
    """The inputs of some linear layers of a block, [tokens, K] each by name; nothing after the last of them runs."""
    found: dict[str, Tensor] = {}

    def record(name: str, own: Tensor) -> None:
        found[name] = own.reshape(-1, own.shape[-1])
        if len(found) == len(modules):
            raise _Stop

    with suppress(_Stop), watching(modules, record):
        run_block(block, x, call)
    return found
