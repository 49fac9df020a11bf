"""Learn rounding and scales block by block against the original model's outputs, as OmniQuant and SignRound do.

A block starts from calibrated codes; its inputs come from the quantized model, its targets from the original. The
result is kept only if its loss over the whole text is lower, so no block gets worse.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anybit.quantization.learn.cuda_graphs import GraphRecorder
from anybit.quantization.learn.fake_quant import Bank, FakeQuantWeight, GivenLinear, banks, parameter_groups
from anybit.quantization.learn.kl_gradient import written_out
from anybit.quantization.pipeline.blocks import Call, run_block
from anybit.quantization.pipeline.calibrate import BlockTask


@dataclass(frozen=True, slots=True)
class BlockLearning:
    """How to learn a block. passes: over the calibration text.  rates: see ``anybit.quantization.methods.distill``."""

    passes: int = 4
    place_rate: float = 0.006
    scale_rate: float = 0.003

    def __call__(self, task: BlockTask) -> None:
        """Improve a block's weights in place, or leave them as they are."""
        places = {module: name for name, module in task.block.named_modules()}
        before = _loss_over(task)
        half = torch.bfloat16 if task.device.type == "cuda" else torch.float32
        found = {name: task.weights[name].to(task.device) for name in task.linears}
        learned = banks(found, task.originals, half, FakeQuantWeight)
        layers: dict[str, GivenLinear] = {}
        for leaves in (bank.leaves for bank in learned):
            for name, leaf in leaves.items():
                module = task.linears[name]
                layers[name] = GivenLinear(leaf, getattr(module, "bias", None))
                for hook in list(module._forward_pre_hooks.values()):
                    layers[name].register_forward_pre_hook(_straight_through(hook))
                task.block.set_submodule(places[module], layers[name], strict=False)
        try:
            self._learn(task, learned)
            hard = {name: weight for bank in learned for name, weight in bank.harden().items()}
            for name, layer in layers.items():
                layer.given = hard[name].dequantize()
            better = _loss_over(task) < before
        finally:
            for module in task.linears.values():
                task.block.set_submodule(places[module], module, strict=False)
        if better:
            task.weights.update({name: hard[name] for name in task.weights if name in hard})

    def _learn(self, task: BlockTask, learned: list[Bank[FakeQuantWeight]]) -> None:
        optimizer = torch.optim.Adam(parameter_groups(learned, self.place_rate, self.scale_rate), betas=(0.9, 0.99))
        count = len(task.calls)
        steps = self.passes * count
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        leaves = [leaf for bank in learned for leaf in bank.leaves.values()]
        run: Callable[..., object] = partial(GraphRecorder(), "step")
        for step in range(steps):
            for bank in learned:
                bank.refresh()
            index = step % count
            call = task.calls[index]

            def gradients(x: Tensor, wanted: Tensor, *tensors: Tensor, call: Call = call) -> tuple[Tensor, ...]:
                call = call.with_tensors(tensors)
                half = torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda, cache_enabled=False)
                with torch.enable_grad(), half, written_out(task.config, x.shape, x.device, layers=1):
                    loss = _distance(run_block(task.block, x, call), wanted)
                for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
                    assert leaf.grad is not None
                    leaf.grad.copy_(gradient)
                return (loss.detach(),)

            operands = (task.inputs(index), task.wanted(index), *call.tensors())
            try:
                run(gradients, *operands)
            except RuntimeError as error:  # a block that synchronizes (reads values on the host) cannot be captured
                warnings.warn(f"learning continues without CUDA graphs, which is slower: {error}", stacklevel=2)
                run = _call
                run(gradients, *operands)
            for bank in learned:
                bank.receive()
            optimizer.step()
            for bank in learned:
                bank.soft.project()
            schedule.step()


def _call(function: Callable[..., object], *tensors: Tensor) -> object:
    return function(*tensors)


def _distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Squared error relative to the target's squared norm, so that learning rates suit blocks of any scale."""
    wanted = wanted.float()
    return (found.float() - wanted).square().sum() / wanted.square().sum().clamp(min=torch.finfo(torch.float32).tiny)


@torch.no_grad()
def _loss_over(task: BlockTask) -> float:
    outputs = (run_block(task.block, task.inputs(i), call) for i, call in enumerate(task.calls))
    return sum(float(_distance(found, task.wanted(i))) for i, found in enumerate(outputs))


def _straight_through(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a rounding hook in a straight-through estimator; differentiable hooks are unchanged."""

    def wrapped(module: nn.Module, args: tuple[Tensor, ...]) -> Any:
        out = hook(module, args)
        if not getattr(hook, "rounds", False):
            return out
        return (args[0] + (out[0] - args[0]).detach(), *args[1:])

    return wrapped
