"""A fusion pass for vLLM's compiled graph: norm, SiLU and RoPE join the GEMMs around them.

vLLM's norm is one op in the graph (``vllm_ir.fused_add_rms_norm``) until vLLM lowers it, and each of anybit's GEMMs is
one op, so the pass can match them:

    add + norm -> linear             ``anybit::norm_linear``: one launch at one or two tokens, or with quantized inputs
    add + norm -> linear -> SiLU     the same with gate and up interleaved and SiLU in the epilogue
    add + norm -> router             ``anybit::norm_router``: one launch, where ``routing`` has put anybit's router
    add + norm, the last one         ``anybit::add_rms_norm``
    SiLU -> linear                   ``anybit::silu_linear``, for quantized inputs if no GEMM has a SiLU epilogue
    add + norm -> linear -> RoPE     ``anybit::norm_rotate_cache`` (16-bit activations; ``rotary``)

SiLU is anybit's op if the MLP's forward is gate_up_proj, act_fn, down_proj. Patterns that do not match run as separate
kernels, with the same results.
"""

import hashlib
import operator
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform

from anybit import ops
from anybit.codes.packing import QuantizedWeight
from anybit.models.families import VLLM_MLP
from anybit.ops.elementwise import paired_rows, silu_mul
from anybit.scheme import Scheme
from anybit.vllm import rotary as rotary  # for its ops

_logger = init_logger("vllm.anybit")
_parents: "WeakKeyDictionary[nn.Module, ref[nn.Module]]" = WeakKeyDictionary()


class SiluMul(nn.Module):
    """silu(gate) * up as an op that the pass can match. paired: gate and up are interleaved eight by eight."""

    def __init__(self, paired: bool) -> None:
        super().__init__()
        self.paired = paired

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2 K] -> [..., K]."""
        return silu_mul(x, self.paired)


@cache
def watch() -> None:
    """Record the parents of projections while a model is built: a layer does not know its siblings."""

    def note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and name in ("qkv_proj", "gate_up_proj", "down_proj"):
            _parents[child] = ref(parent)

    register_module_module_registration_hook(note)


def parent_of(layer: nn.Module, name: str) -> nn.Module | None:
    """The module that holds a layer as attribute ``name``; None if none does."""
    parent = _parents[layer]() if layer in _parents else None
    return parent if getattr(parent, name, None) is layer else None


def _mlp_of(layer: nn.Module) -> nn.Module | None:
    """The MLP of a gate_up_proj layer, if its forward is the standard one; else None."""
    parent = parent_of(layer, "gate_up_proj")
    if parent is None:
        return None
    plain = type(parent).forward.__code__.co_names in VLLM_MLP and type(getattr(parent, "act_fn", None)) is SiluAndMul
    return parent if plain else None


def pairs_of(layer: LinearBase, scheme: Scheme, weight: QuantizedWeight) -> Tensor | None:
    """The output order of a gate_up_proj for a GEMM with a SiLU epilogue; None for the model's own order.

    If no GEMM with quantized activations has that epilogue, the kernel before down_proj applies SiLU, to gate and up in
    the model's order. weight: of the layer, or of a part of it.
    """
    outputs = layer.anybit_outputs
    plain = len(outputs) == 2 and outputs[0] == outputs[1] and outputs[0] % 8 == 0
    if not plain or _mlp_of(layer) is None:
        return None
    if scheme.activations.quantized and not ops.ends_with_silu(weight, scheme.activations):
        return None
    return paired_rows(outputs[0])


def activate(layer: nn.Module, paired: bool) -> bool:
    """Replace the activation after a gate_up_proj by anybit's op; False for an MLP of another form.

    paired: its outputs are interleaved.
    """
    mlp = _mlp_of(layer)
    if mlp is not None:
        mlp.act_fn = SiluMul(paired)
    return mlp is not None


def install() -> None:
    """Add the pass to the model being built, unless the user has set a custom pass."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return
    passes = config.compilation_config.inductor_compile_config
    if not isinstance(passes.setdefault(current_platform.pass_key, FusionPass()), FusionPass):
        _logger.warning_once(
            "anybit: norms, SiLU and RoPE are kernels of their own, since --compilation-config has another %s",
            current_platform.pass_key,
        )


class FusionPass(InductorPass):  # type: ignore[misc]
    """Fuses norms, GEMMs, SiLU and RoPE; see the module."""

    def uuid(self) -> str:
        """Hash of this file, so that vLLM's cache holds no graphs rewritten by another version of it."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place, before vLLM lowers its own ops."""
        nodes = list(graph.nodes)
        silu = sum(_join_silu(graph, node) for node in nodes if _is(node, torch.ops.anybit.silu_mul.default))
        norms = sum(any(join(graph, node) for join in _OF_NORMS) for node in nodes if _is(node, *_NORMS))
        graph.eliminate_dead_code()
        _logger.debug("anybit: of vLLM's graph %d norms and %d SiLUs run on anybit", norms, silu)


_LINEAR = (torch.ops.anybit.linear.default, torch.ops.anybit.hadamard_linear.default)


def _is(node: object, *targets: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _only_user(node: fx.Node, *targets: object) -> fx.Node | None:
    """The only user of a node, if it calls one of ``targets`` with the node as first argument; else None."""
    users = list(node.users)
    return users[0] if len(users) == 1 and _is(users[0], *targets) and users[0].args[0] is node else None


def _join_silu(graph: fx.Graph, silu: fx.Node) -> bool:
    down = _only_user(silu, *_LINEAR)
    if down is None or (len(silu.args) > 1 and silu.args[1]) or silu.kwargs or down.kwargs:
        return False
    rotated = down.target is _LINEAR[1]
    with graph.inserting_before(down):
        joined = graph.call_function(torch.ops.anybit.silu_linear.default, (silu.args[0], *down.args[1:], rotated))
    joined.meta["val"] = down.meta.get("val")  # only this: other metadata describes the old call's arguments
    down.replace_all_uses_with(joined)
    graph.erase_node(down)
    return True


_NORMS = (torch.ops.vllm_ir.rms_norm.default, torch.ops.vllm_ir.fused_add_rms_norm.default)


def _arguments(norm: fx.Node) -> dict[str, Any]:
    """The arguments of either norm, by name; x_residual is None for the one without a residual add."""
    names = ("x", *(("x_residual",) if norm.target is _NORMS[1] else ()), "weight", "epsilon", "variance_size")
    return {"x_residual": None, "variance_size": None, **dict(zip(names, norm.args, strict=False)), **norm.kwargs}


def _is_anybits(values: dict[str, Any]) -> bool:
    """Whether anybit's norm computes the same: over whole rows, gamma in the rows' dtype (Gemma's is float32)."""
    given = [values[name] for name in ("x", "x_residual", "weight") if values[name] is not None]
    types = {getattr(one.meta.get("val"), "dtype", None) for one in given}
    return values["weight"] is not None and values["variance_size"] is None and len(types) == 1


def _replace_last(graph: fx.Graph, norm: fx.Node) -> bool:
    """Replace an add + norm before no GEMM: vLLM's compiled one does not round the sum as transformers does."""
    values = _arguments(norm)
    if norm.target is not _NORMS[1] or not _is_anybits(values):
        return False
    given = [values[name] for name in ("x", "x_residual", "weight")]
    with graph.inserting_before(norm):
        ours = graph.call_function(torch.ops.anybit.add_rms_norm.default, (*given, values["epsilon"]))
    ours.meta["val"] = norm.meta.get("val")
    norm.replace_all_uses_with(ours)
    graph.erase_node(norm)
    return True


def _join_norm(graph: fx.Graph, norm: fx.Node) -> bool:
    values, adds = _arguments(norm), norm.target is _NORMS[1]
    parts = {user.args[1]: user for user in norm.users if adds and _is(user, operator.getitem)}
    normed, total = parts.get(0) if adds else norm, parts.get(1)
    linear = None if normed is None else _only_user(normed, *_LINEAR)
    if linear is None or linear.kwargs or not _is_anybits(values):
        return False
    if not adds and not getattr(values["x"].meta.get("val"), "is_contiguous", bool)():  # a slice of wider rows
        return False
    _, weight, bias, spec = linear.args
    if not _are_there((*weight, bias)):  # type: ignore[misc]
        return False
    rotated = linear.target is _LINEAR[1]
    given = (values["x"], values["x_residual"], values["weight"], values["epsilon"], weight, bias, spec)
    turn = None if rotated else _only_user(linear, torch.ops.anybit.rotate_cache.default)
    silu = _only_user(linear, torch.ops.anybit.silu_mul.default)
    rest: tuple[Any, ...] = (False, rotated)
    last, target = linear, torch.ops.anybit.norm_linear.default
    if turn is not None and adds and turn.args[8] and _are_there(turn.args[1:]):
        _, positions, table, *heads = turn.args[:5]
        last, target, rest = turn, torch.ops.anybit.norm_rotate_cache.default, (positions, table, *heads, turn.args[9])
    elif silu is not None and len(silu.args) > 1 and bool(silu.args[1]):
        last, rest = silu, (True, rotated)
    with graph.inserting_before(norm):
        joined = graph.call_function(target, (*given, *rest))
        y = graph.call_function(operator.getitem, (joined, 0))
        summed = graph.call_function(operator.getitem, (joined, 1))
    y.meta["val"] = last.meta.get("val")
    summed.meta["val"] = values["x"].meta.get("val")
    if total is not None:
        total.replace_all_uses_with(summed)
    joined.meta["val"] = y.meta["val"], summed.meta["val"]
    last.replace_all_uses_with(y)
    for node in (last, linear, normed, total, norm):
        if node is not None and not node.users and node in graph.nodes:
            graph.erase_node(node)
    return True


def _join_router(graph: fx.Graph, norm: fx.Node) -> bool:
    """Join an add + norm and the router of its rows, which others read too."""
    values = _arguments(norm)
    parts = {user.args[1]: user for user in norm.users if _is(user, operator.getitem)}
    routers = [user for user in parts[0].users if _is(user, torch.ops.anybit.router.default)] if 0 in parts else []
    if norm.target is not _NORMS[1] or not _is_anybits(values) or len(routers) != 1:
        return False
    if not _are_there(routers[0].args[1:]):
        return False
    chosen = {user.args[1]: user for user in routers[0].users}
    given = (values["x"], values["x_residual"], values["weight"], values["epsilon"], *routers[0].args[1:])
    olds = (parts[0], parts.get(1), chosen.get(0), chosen.get(1))
    with graph.inserting_before(norm):
        joined = graph.call_function(torch.ops.anybit.norm_router.default, given)
        news = [graph.call_function(operator.getitem, (joined, place)) for place in range(4)]
    joined.meta["val"] = (*norm.meta["val"], *routers[0].meta["val"])
    for new, old, value in zip(news, olds, joined.meta["val"], strict=True):
        new.meta["val"] = value
        if old is not None:
            old.replace_all_uses_with(new)
    for node in (*(old for old in olds[::-1] if old is not None), routers[0], norm):
        graph.erase_node(node)
    return True


def _are_there(values: Iterable[object]) -> bool:
    """Whether all nodes among values are graph inputs, which are available before any other node."""
    return all(one.op in ("placeholder", "get_attr") for one in values if isinstance(one, fx.Node))


_OF_NORMS = (_join_norm, _join_router, _replace_last)
