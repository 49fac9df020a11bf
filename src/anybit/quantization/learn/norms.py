"""Norms in training: fused, since a small model spends more time on unfused norms than on its GEMMs; their gains."""

import torch
from torch import Tensor, nn

from anybit.quantization.learn.adam import Adam
from anybit.quantization.learn.student import gains_of


class FusedRMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x over the last dimension."""
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.epsilon)


@torch.no_grad()
def fuse_norms(model: nn.Module) -> int:
    """Replace the norms that FusedRMSNorm reproduces, as a trial of each class shows; returns how many."""
    known: dict[type, bool] = {}
    count = 0
    for name, module in list(model.named_modules()):
        weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(epsilon, float):
            continue
        fused = FusedRMSNorm(weight, epsilon)
        kind = type(module)
        if kind not in known:
            x = torch.linspace(-3, 2, 4 * len(weight), device=weight.device, dtype=weight.dtype).view(4, -1)
            known[kind] = torch.allclose(fused(x), module(x), rtol=1e-2, atol=1e-3 * float(weight.abs().max()))
        if known[kind]:
            model.set_submodule(name, fused, strict=False)
            count += 1
    return count


class Gains:
    """A student's own gains of its norms, in float32, learned as one tensor: ``moving``.

    named: views of it, by name.  gradient: of all, accumulates.
    """

    def __init__(self, student: nn.Module) -> None:
        shared = gains_of(student)
        sizes = [len(gain) for gain in shared.values()]
        device = next(student.parameters()).device
        empty = torch.zeros(0, device=device)
        self.moving = Adam.of(torch.cat([empty, *(gain.detach().float() for gain in shared.values())]))
        self.gradient = torch.zeros_like(self.moving.value)
        own: dict[nn.Parameter, nn.Parameter] = {}
        parts = zip(self.moving.value.split(sizes), self.gradient.split(sizes), strict=True)
        for gain, (value, gradient) in zip(shared.values(), parts, strict=True):
            own[gain] = nn.Parameter(value)
            own[gain].grad = gradient
        for module in student.modules():
            weight = module._parameters.get("weight")
            if weight in own:
                module._parameters["weight"] = own[weight]
        self.named = gains_of(student)

    def step(self, rate: float, count: int, factor: Tensor) -> None:
        """Take a step of Adam, the ``count``-th, from the gradient times a factor."""
        self.moving.step(self.gradient * factor, rate, count)
        self.gradient.zero_()
