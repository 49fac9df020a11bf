"""Rounding and clipping learned block by block against the original's output (as OmniQuant and SignRound do).

A block starts from calibrated codes; its inputs are those of the quantized model, its wanted outputs the original's.
What is learned is kept if it is better over all of the text, so a block never gets worse.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybit.quantize.blocks import run_block
from anybit.quantize.calibrate import BlockTask
from anybit.quantize.soft import SoftLinear, parameter_groups


@dataclass(frozen=True, slots=True)
class BlockLearning:
    """How to learn a block. passes: over the calibration text.  rates: see ``anybit.quantize.distill``."""

    passes: int = 4
    place_rate: float = 0.006
    scale_rate: float = 0.003

    def __call__(self, task: BlockTask) -> None:
        """Improve a block's weights in place, or leave them as they are."""
        places = {module: name for name, module in task.block.named_modules()}
        before = _loss_over(task)
        soft: dict[str, SoftLinear] = {}
        for name, module in task.linears.items():
            bias = getattr(module, "bias", None)
            layer = SoftLinear(task.weights[name].to(task.device), task.originals[name], bias)
            for hook in list(module._forward_pre_hooks.values()):
                layer.register_forward_pre_hook(_straight_through(hook))
            soft[name] = layer.to(task.device)
            task.block.set_submodule(places[module], layer, strict=False)
        try:
            self._learn(task, list(soft.values()))
            hard = {name: layer.soft.harden() for name, layer in soft.items()}
            for name, layer in soft.items():
                layer.fix(hard[name].dequantize())
            better = _loss_over(task) < before
        finally:
            for module in task.linears.values():
                task.block.set_submodule(places[module], module, strict=False)
        if better:
            task.weights.update(hard)

    def _learn(self, task: BlockTask, layers: list[SoftLinear]) -> None:
        optimizer = torch.optim.Adam(parameter_groups(layers, self.place_rate, self.scale_rate), betas=(0.9, 0.99))
        count = len(task.calls)
        steps = self.passes * count
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for step in range(steps):
            loss = _loss(task, step % count)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            for layer in layers:
                layer.soft.project()
            schedule.step()


def _loss(task: BlockTask, index: int) -> Tensor:
    """Squared distance from the wanted output over its own square, so that blocks of any scale learn alike."""
    wanted = task.wanted(index).float()
    found = run_block(task.block, task.inputs(index), task.calls[index]).float()
    return (found - wanted).square().sum() / wanted.square().sum().clamp(min=torch.finfo(torch.float32).tiny)


@torch.no_grad()
def _loss_over(task: BlockTask) -> float:
    return sum(float(_loss(task, index)) for index in range(len(task.calls)))


def _straight_through(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook whose rounding lets gradients through; one that is differentiable is left as it is."""

    def wrapped(module: nn.Module, args: tuple[Tensor, ...]) -> Any:
        out = hook(module, args)
        if not getattr(hook, "rounds", False):
            return out
        return (args[0] + (out[0] - args[0]).detach(), *args[1:])

    return wrapped
