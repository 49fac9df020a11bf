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
from anybit.ops import router as router  # for its ops
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
    """Record the parents of projections and experts while a model is built: a layer does not know its siblings."""

    def note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and name in ("qkv_proj", "gate_up_proj", "down_proj", "experts"):
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


def _replace(
    graph: fx.Graph, node: fx.Node, target: object, args: tuple[Any, ...], *outputs: tuple[fx.Node | None, Any]
) -> bool:
    """Call an op before a node; readers of the outputs' nodes, if any, read its own. True; dead nodes go at the end.

    outputs: (the node whose place it takes, fake value) of each.
    """
    with graph.inserting_before(node):
        call = graph.call_function(target, args)  # type: ignore[arg-type]
        places = range(len(outputs))
        news = [graph.call_function(operator.getitem, (call, i)) for i in places] if len(outputs) > 1 else [call]
    call.meta["val"] = tuple(value for _, value in outputs)  # only this: other metadata describes the old arguments
    for new, (old, value) in zip(news, outputs, strict=True):
        new.meta["val"] = value
        if old is not None:
            old.replace_all_uses_with(new)
    return True


def _join_silu(graph: fx.Graph, silu: fx.Node) -> bool:
    down = _only_user(silu, *_LINEAR)
    if down is None or (len(silu.args) > 1 and silu.args[1]) or silu.kwargs or down.kwargs:
        return False
    given = (silu.args[0], *down.args[1:], down.target is _LINEAR[1])
    return _replace(graph, down, torch.ops.anybit.silu_linear.default, given, (down, down.meta.get("val")))


_NORMS = (torch.ops.vllm_ir.rms_norm.default, torch.ops.vllm_ir.fused_add_rms_norm.default)


def _given(norm: fx.Node) -> tuple[Any, ...] | None:
    """(x, residual, gamma, epsilon) of a norm, residual None if it adds none; None for a norm that anybit has not.

    anybit's is over whole rows, with gamma in the rows' dtype (Gemma's is float32).
    """
    names = ("x", *(("x_residual",) if norm.target is _NORMS[1] else ()), "weight", "epsilon", "variance_size")
    values = {**dict(zip(names, norm.args, strict=False)), **norm.kwargs}
    x, residual, gamma = (values.get(name) for name in ("x", "x_residual", "weight"))
    types = {getattr(one.meta.get("val"), "dtype", None) for one in (x, residual, gamma) if isinstance(one, fx.Node)}
    same = gamma is not None and values.get("variance_size") is None and len(types) == 1
    return (x, residual, gamma, values["epsilon"]) if same else None


def _parts(node: fx.Node) -> dict[Any, fx.Node]:
    """The nodes that take single outputs of a node, by number."""
    return {user.args[1]: user for user in node.users if _is(user, operator.getitem)}


def _replace_last(graph: fx.Graph, norm: fx.Node) -> bool:
    """Replace an add + norm before no GEMM: vLLM's compiled one does not round the sum as transformers does."""
    given = _given(norm)
    if given is None or norm.target is not _NORMS[1]:
        return False
    return _replace(graph, norm, torch.ops.anybit.add_rms_norm.default, given, (norm, norm.meta.get("val")))


def _join_norm(graph: fx.Graph, norm: fx.Node) -> bool:
    given, adds = _given(norm), norm.target is _NORMS[1]
    parts = _parts(norm) if adds else {0: norm}
    linear = _only_user(parts[0], *_LINEAR) if 0 in parts else None
    if linear is None or linear.kwargs or given is None:
        return False
    row = given[0].meta.get("val")
    if not adds and not getattr(row, "is_contiguous", bool)():  # a slice of wider rows
        return False
    _, weight, bias, spec = linear.args
    if not _are_there((*weight, bias)):  # type: ignore[misc]
        return False
    rotated = linear.target is _LINEAR[1]
    turn = None if rotated else _only_user(linear, torch.ops.anybit.rotate_cache.default)
    silu = _only_user(linear, torch.ops.anybit.silu_mul.default)
    rest: tuple[Any, ...] = (False, rotated)
    last, target = linear, torch.ops.anybit.norm_linear.default
    if turn is not None and adds and turn.args[8] and _are_there(turn.args[1:]):
        _, positions, table, *heads = turn.args[:5]
        last, target, rest = turn, torch.ops.anybit.norm_rotate_cache.default, (positions, table, *heads, turn.args[9])
    elif silu is not None and len(silu.args) > 1 and bool(silu.args[1]):
        last, rest = silu, (True, rotated)
    outputs = (last, last.meta.get("val")), (parts.get(1), row)
    return _replace(graph, norm, target, (*given, weight, bias, spec, *rest), *outputs)


def _join_router(graph: fx.Graph, norm: fx.Node) -> bool:
    """Join an add + norm and the router of its rows, which others read too."""
    given, parts = _given(norm), _parts(norm)
    routers = [user for user in parts[0].users if _is(user, torch.ops.anybit.router.default)] if 0 in parts else []
    if norm.target is not _NORMS[1] or given is None or len(routers) != 1 or not _are_there(routers[0].args[1:]):
        return False
    chosen, values = _parts(routers[0]), (*norm.meta["val"], *routers[0].meta["val"])
    olds = (parts[0], parts.get(1), chosen.get(0), chosen.get(1))
    args = (*given, *routers[0].args[1:])
    return _replace(graph, norm, torch.ops.anybit.norm_router.default, args, *zip(olds, values, strict=True))


def _are_there(values: Iterable[object]) -> bool:
    """Whether all nodes among values are graph inputs, which are available before any other node."""
    return all(one.op in ("placeholder", "get_attr") for one in values if isinstance(one, fx.Node))


_OF_NORMS = (_join_norm, _join_router, _replace_last)
