"""Make a real mixture of experts out of a small dense model, since no package ships the weights of one.

python scripts/upcycle.py PARENT TEXT FOLDER [--minutes 4] [--experts 8] [--top 2]

Sparse upcycling (Komatsuzaki et al., 2023): FOLDER is a Mixtral with the attention of PARENT (a Llama) and, in every
layer, copies of its MLP, each disturbed, behind a router. Then experts and routers learn the parent's predictions, over
the second half of TEXT and over what the parent writes itself, so that experts differ and the router decides.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from anybit.checkpoints.writing import new_folder
from anybit.quantization.learn.generated import written

LENGTH, ROWS = 512, 16
"""Tokens of a sequence, sequences of a step."""
NOISE, RATE, ROUTER_RATE, BALANCE = 0.1, 2e-4, 1e-3, 0.02
"""Of a copied weight's rms; of Adam; the share of Mixtral's load-balancing loss."""
SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
CARD = """# {name}: upcycled

Not a trained mixture of experts: an *upcycled* one. {experts} copies of each MLP of `{parent}`, {top} a token,
disturbed and trained for {minutes:g} minutes to predict what the parent predicts (scripts/upcycle.py of anybit).
"""


def upcycled(parent: LlamaForCausalLM, tokens: Tensor, experts: int, top: int) -> MixtralForCausalLM:
    """The mixture before it learns. tokens: int64 [B, L], to see the inputs of the parent's MLPs."""
    config = MixtralConfig(
        **{key: getattr(parent.config, key) for key in SHARED}, sliding_window=None, num_local_experts=experts,
        num_experts_per_tok=top, router_aux_loss_coef=BALANCE,
    )  # fmt: skip
    with torch.device(parent.device):
        model = MixtralForCausalLM(config)
    missing, unexpected = model.load_state_dict(parent.state_dict(), strict=False)
    assert all(".mlp." in name for name in (*missing, *unexpected)), (missing, unexpected)
    means = inputs(parent, tokens)
    for layer, dense, x in zip(model.model.layers, parent.model.layers, means, strict=True):
        sources = {
            "gate_up_proj": torch.cat([dense.mlp.gate_proj.weight, dense.mlp.up_proj.weight]),
            "down_proj": dense.mlp.down_proj.weight,
        }
        for name, source in sources.items():
            own = layer.mlp.experts.get_parameter(name)
            own.data = source.data + NOISE * source.data.square().mean().sqrt() * torch.randn_like(own)
        # Directions in which inputs differ, not the mean that all share: else one expert would get everything.
        mean = x.mean(0)
        directions = torch.randn(experts, len(mean), device=x.device)
        directions -= torch.outer(directions @ mean, mean) / mean.square().sum()
        layer.mlp.gate.weight.data = directions / (x @ directions.T).std()
    return model


def inputs(parent: LlamaForCausalLM, tokens: Tensor) -> list[Tensor]:
    """The inputs [B L, H] of each layer's MLP."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0].flatten(0, 1).float())

    hooks = [layer.mlp.register_forward_pre_hook(keep) for layer in parent.model.layers]
    with torch.no_grad():
        parent(input_ids=tokens.to(parent.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def learn(
    model: MixtralForCausalLM, parent: LlamaForCausalLM, text: list[Tensor], seconds: float, say: Callable[[str], None]
) -> None:
    """Teach experts and routers, with Adam over float32 copies, until the time is over."""
    model.requires_grad_(False)
    learning = [p for name, p in model.named_parameters() if ".mlp." in name]
    rates = [ROUTER_RATE if p.ndim == 2 else RATE for p in learning]
    whole = [p.detach().float().requires_grad_() for p in learning]
    adam = torch.optim.AdamW(
        [{"params": [p], "lr": rate, "base": rate} for p, rate in zip(whole, rates, strict=True)],
        betas=(0.9, 0.95), weight_decay=0.0, foreach=True,
    )  # fmt: skip
    for parameter in learning:
        parameter.requires_grad_()
    began = told = time.monotonic()
    for step, tokens in enumerate(batches(text)):
        done = (time.monotonic() - began) / seconds
        if step and done >= 1:
            break
        tokens = tokens.to(model.device)
        with torch.no_grad():
            wanted = parent(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
        out = model(input_ids=tokens, use_cache=False, output_router_logits=True)
        found = out.logits.float().log_softmax(-1)
        kl = functional.kl_div(found, wanted, log_target=True, reduction="sum") / tokens.numel()
        (kl + BALANCE * out.aux_loss).backward()
        for copy, parameter in zip(whole, learning, strict=True):
            copy.grad, parameter.grad = parameter.grad.float(), None
        for group in adam.param_groups:
            group["lr"] = group["base"] * min((step + 1) / 20, 0.5 * (1 + math.cos(math.pi * min(done, 1))) + 0.02)
        adam.step()
        with torch.no_grad():
            for copy, parameter in zip(whole, learning, strict=True):
                parameter.copy_(copy)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            say(f"step {step}: KL {kl:.4f} nats a token, load balance {out.aux_loss:.2f}")


def batches(text: list[Tensor]) -> Iterator[Tensor]:
    """Endless steps, int64 [ROWS, LENGTH] or fewer rows; passes are shuffled."""
    for epoch in itertools.count():
        order = torch.randperm(len(text), generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(ROWS):
            yield torch.stack([text[i] for i in chosen.tolist()])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("parent", "text", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--minutes", type=float, default=4.0, help="of learning")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top", type=int, default=2, help="experts a token")
    parser.add_argument("--written", type=int, default=2_000_000, help="tokens that the parent writes first")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    kind = AutoConfig.from_pretrained(arguments.parent).model_type
    if kind != "llama":  # transformers would load it all the same, with random weights where names differ
        parser.error(f"PARENT must be a Llama, and {arguments.parent} is of model_type {kind}")
    tokenizer = AutoTokenizer.from_pretrained(arguments.parent)
    parent = LlamaForCausalLM.from_pretrained(arguments.parent, dtype=dtype).to(device).eval()
    content = arguments.text.read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(content[len(content) // 2 :]).input_ids)
    text = list(ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH))
    if not text:
        parser.error(f"half of TEXT must have {LENGTH} tokens or more, and that of {arguments.text} has {len(ids)}")
    model = upcycled(parent, torch.stack(text[:ROWS]), arguments.experts, arguments.top).to(dtype)
    for rows in written(parent, text, arguments.written, LENGTH, torch.device(device)):
        text += list(rows)
    learn(model, parent, text, 60 * arguments.minutes, print)
    with new_folder(arguments.folder, overwrite=True) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        card = CARD.format(**vars(arguments) | {"name": arguments.folder.name, "parent": arguments.parent.name})
        (folder / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
