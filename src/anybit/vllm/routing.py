"""A layer's router and experts as ops of anybit in vLLM's graph, where the ``fusion`` pass joins the norm before them.

vLLM hides both in one op, with two or three launches for the router. That stays for what ``router`` does not compute.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from anybit.vllm import fusion

_logger = init_logger("vllm.anybit")


def install(layer: nn.Module, config: VllmConfig) -> tuple[int, bool] | None:
    """Let the runner of routed experts call ``anybit::router``; None, and a line in the log, if vLLM's router stays.

    Returns the number of experts that the router takes from, and whether it renormalizes.
    """
    runner = config.compilation_config.static_forward_context.get(layer.layer_name)
    reason = "they have no runner" if runner is None else why_not(runner, config)
    if reason is not None:
        _logger.info_once("anybit: vLLM's own kernels choose the experts of each token: %s", reason)
        return None
    gate = _gate_of(runner)
    runner._forward_entry = functools.partial(_routed, runner, gate)
    return len(gate.weight), bool(runner.router.renormalize)


def _routed(runner: Any, gate: nn.Module, x: Tensor, *_: object) -> Tensor:
    """In place of vLLM's op: the routed experts' output for x [tokens, hidden]; given logits are not read."""
    router = runner.router
    ids, shares = torch.ops.anybit.router(x, gate.weight, router.top_k, router.renormalize)
    y: Tensor = runner.routed_experts.forward_modular(x, shares, ids)
    return y


def _gate_of(runner: Any) -> Any:
    """The module whose logits a runner takes: its own ``gate``, or the one beside it in its block; None if unknown.

    The block is called once, up to its experts: they must get the very tensors that its ``gate`` reads and returns.
    The model computes those logits still, which a compiled graph, where nothing reads them, leaves out.
    """
    block = fusion.parent_of(runner, "experts")
    gate = getattr(block, "gate", None)
    if runner.gate is not None or block is None or not isinstance(gate, nn.Module):
        return runner.gate
    read: list[object] = []
    given: list[object] = []

    def stop(_: nn.Module, args: Sequence[object], words: dict[str, object]) -> None:
        given.extend((*args, *words.values()))
        raise StopIteration

    hooks = (
        gate.register_forward_hook(lambda _, x, y: read.extend((x[0], y[0]))),
        runner.register_forward_pre_hook(stop, with_kwargs=True),
    )
    with contextlib.suppress(Exception), torch.inference_mode():
        weight = gate.get_parameter("weight")
        block(weight.new_zeros(1, weight.shape[-1]))
    for hook in hooks:
        hook.remove()
    return gate if [*map(id, read)] == [*map(id, given)] != [] else None


def why_not(runner: Any, config: VllmConfig) -> str | None:
    """Why a runner's op is more than a plain router and the routed experts on this rank's own tokens, or None."""
    router, moe = runner.router, runner.moe_config
    parallel = moe.moe_parallel_config
    if runner.shared_experts is not None:
        return "shared experts run beside the routed ones"
    if runner.routed_input_transform is not None:
        return "experts take another input than the router"
    if type(router) is not FusedTopKRouter or router.scoring_func != "softmax":
        return f"anybit has no kernel for a {type(router).__name__} of {getattr(router, 'scoring_func', 'its own')}"
    if router.eplb_state is not None or getattr(config.model_config, "enable_return_routed_experts", False):
        return "the chosen experts are recorded"
    if config.lora_config is not None:
        return "LoRA may add to the logits"
    if not parallel.dp_size == parallel.pcp_size == 1 or moe.is_sequence_parallel or runner.enable_dbo:
        return "other ranks, or the other half of a step, share the tokens"
    if not hasattr(runner, "_forward_entry"):
        return "this version of vLLM calls them in another way"
    gate = _gate_of(runner)
    if gate is None:
        return "their block has no gate whose rows and logits they get"
    if type(gate) not in (ReplicatedLinear, GateLinear):
        return f"the router's weight is in a {type(gate).__name__}"
    if type(gate.quant_method) is not UnquantizedLinearMethod:
        return "the router's weight is quantized"
    if gate.bias is not None:
        return "the router has a bias"
    if gate.weight.dtype != moe.in_dtype or getattr(gate, "out_dtype", None) not in (None, moe.in_dtype):
        return f"the router's logits are not computed in {moe.in_dtype}, as the experts are"
    return None
