"""A layer's router and experts as ops of anybit in vLLM's graph, where the ``fusion`` pass joins the norm before them.

vLLM hides both in one op, with two or three launches for the router. That stays for what ``router`` does not compute:
shared experts, groups, biases, sigmoids, or tokens that other ranks send.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod


def install(layer: nn.Module, config: VllmConfig) -> tuple[int, bool] | None:
    """Let the runner of routed experts call ``anybit::router``; None if vLLM's own router stays.

    Returns the number of experts that the router takes from, and whether it renormalizes.
    """
    runner = config.compilation_config.static_forward_context.get(layer.layer_name)
    if runner is None or not _is_plain(runner, config):
        return None
    runner._forward_entry = MethodType(_routed, runner)
    return len(runner.gate.weight), bool(runner.router.renormalize)


def _routed(runner: Any, x: Tensor, *_: object) -> Tensor:
    """In place of vLLM's op: the routed experts' output for x [tokens, hidden]."""
    router = runner.router
    ids, shares = torch.ops.anybit.router(x, runner.gate.weight, router.top_k, router.renormalize)
    y: Tensor = runner.routed_experts.forward_modular(x, shares, ids)
    return y


def _is_plain(runner: Any, config: VllmConfig) -> bool:
    """Whether a runner's op is a plain router and the routed experts, on this rank's own tokens."""
    router, moe = runner.router, runner.moe_config
    gate: Any = getattr(runner, "gate", None)
    parallel = moe.moe_parallel_config
    alone = parallel.dp_size == parallel.pcp_size == 1 and not moe.is_sequence_parallel and not runner.enable_dbo
    softmax = type(router) is FusedTopKRouter and router.scoring_func == "softmax" and router.eplb_state is None
    watched = getattr(config.model_config, "enable_return_routed_experts", False)
    return bool(
        hasattr(runner, "_forward_entry")
        and runner.shared_experts is None
        and runner.routed_input_transform is None
        and type(gate) is ReplicatedLinear
        and type(gate.quant_method) is UnquantizedLinearMethod
        and gate.bias is None
        and gate.weight.dtype == moe.in_dtype
        and not watched
        and config.lora_config is None
        and alone
        and softmax
    )
