"""Greedy outputs of vLLM with anybit against anybit's own generate: a small model, quantized and saved here.

    python benchmarks/serving_check.py w4a16g128 --source FOLDER      # a Llama's folder; by default random weights
    python benchmarks/serving_check.py w4a16g128 --dtype float32 --eager     # on a CPU: little rounding

In 16 bits, another summation order can flip near-ties, and outputs diverge. So each output is compared with
generate in several ways: as the model is loaded, fused (then with the kernels of vLLM's layers), and also with
vLLM's attention (FlashAttention for prompts), after which nothing differs. How far a token of vLLM is below
generate's largest logit after the same tokens tells rounding from an error.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anybit.cache.kvcache import KVCache
from anybit.ops.kv import Masks
from serving import HEAD, engine, greedy

NEW, CONTEXT = 32, 512
TEXTS = (
    "The capital of France is", "Photosynthesis is", "Write a short poem about the sea:", "2, 4, 6, 8,",
    "A recipe for bread needs", "In 1969", "The largest planet of the solar system", "def fibonacci(n):",
)  # fmt: skip
Answers = list[list[int]]


def random_llama() -> str:
    """A folder with a small random model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tempfile.mkdtemp(prefix="check-fp-")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128, vocab_size=4096, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    whole = LlamaForCausalLM(config).half()
    for parameter in whole.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.05)
    whole.save_pretrained(folder)
    return folder


def attend_as_vllm(
    module: torch.nn.Module | None, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float,
    page: int = 16, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """A request's attention as in vLLM, over pages of ``page`` tokens: q [1, heads, tokens, dim]."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    from anybit.ops import kv_plain

    q, seen = query[0].transpose(0, 1).contiguous(), key.shape[2]
    pages = [
        torch.nn.functional.pad(x[0].transpose(0, 1), (0, 0, 0, 0, 0, -seen % page))
        .unflatten(0, (-1, page))
        .contiguous()
        for x in (key, value)
    ]
    table = torch.arange(len(pages[0]), dtype=torch.int32, device=q.device)[None]
    out, lengths = torch.empty_like(q), torch.tensor([seen], dtype=torch.int32, device=q.device)
    if len(q) == 1:  # a step
        kv_plain.decode(q, *pages, table, lengths, Masks(scaling), out=out, capacity=CONTEXT, overlaps=False)
        return out[None], None
    flash_attn_varlen_func(
        q, *pages, max_seqlen_q=len(q), max_seqlen_k=seen, softmax_scale=scaling, causal=True, block_table=table,
        out=out,
        cu_seqlens_q=torch.tensor([0, len(q)], dtype=torch.int32, device=q.device),
        seqused_k=lengths,
        fa_version=get_flash_attn_version(head_size=q.shape[-1]),
    )  # fmt: skip
    return out[None], None


def prefill_as_vllm(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, sequence: int, masks: Masks) -> Tensor:
    """Prefill a whole prompt into an AnyBitCache with vLLM's attention: x [tokens, heads, dim]."""
    cache.write(layer, [sequence], k[None], v[None])
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return attend_as_vllm(None, *heads, None, masks.scale or q.shape[-1] ** -0.5, page=128)[0][0]


def quantized(mode: str, source: str, dtype: str) -> tuple[str, PreTrainedModel]:
    """A model quantized while loading, and the folder it was saved to."""
    from transformers import AutoModelForCausalLM

    from anybit.hf.transformers import AnyBitConfig

    folder = tempfile.mkdtemp(prefix=f"check-{mode}-")
    scheme, _, head = mode.partition("+")
    config = AnyBitConfig(scheme, overrides={HEAD: head} if head else None)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=dtype)
    model.save_pretrained(folder)
    return folder, model.to("cuda" if torch.cuda.is_available() else "cpu")


def prompts_of(source: str | Path) -> list[list[int]]:
    """Token ids of the prompts."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):  # random models have no tokenizer
        return [[random.Random(i).randint(10, 4000) for _ in range(24)] for i in range(8)]
    return [tokenizer(text).input_ids for text in TEXTS]


class Generated:
    """A model in anybit, and its own outputs by how they were generated."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]]) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import flash_attention_mask

        self.model, self.prompts, self.device = model, prompts, model.device
        self.model.generation_config.eos_token_id = None  # treat EOS like any token, in both
        AttentionInterface.register("as vLLM", attend_as_vllm)
        AttentionMaskInterface.register("as vLLM", flash_attention_mask)

    def answers(self, **options: object) -> Answers:
        """Greedy outputs of the model as it is now."""
        ask = {"max_new_tokens": NEW, "do_sample": False, **options}
        rows = [torch.tensor([prompt], device=self.device) for prompt in self.prompts]
        return [self.model.generate(row, **ask)[0, row.shape[1] :].tolist() for row in rows]

    def all_answers(self, static: bool) -> dict[str, Answers]:
        """Outputs by how they were generated. static: also in CUDA graphs, which cannot share a process with vLLM's.

        With anybit's KV cache, whose kernels vLLM's steps also run, only prompts use vLLM's attention.
        """
        import anybit

        found = {"generate": self.answers()}
        print(f"smallest logit margin: {min(min(self.below(i, a)[1]) for i, a in enumerate(found['generate'])):.4f}")
        anybit.fuse(self.model)
        found["fused generate"] = self.answers()
        if self.device.type == "cuda" and static:
            found["fused generate in graphs"] = self.answers(cache_implementation="static")
        if self.device.type == "cuda":
            before = self.model.config._attn_implementation
            self.model.set_attn_implementation("as vLLM")
            with patch("anybit.cache.attention.prefill", prefill_as_vllm):
                found["fused generate with vLLM's attention"] = self.answers()
            self.model.set_attn_implementation(before)
        anybit.unfuse(self.model)
        return found

    def below(self, index: int, answer: list[int]) -> tuple[list[float], list[float]]:
        """How far an output's tokens are below the largest logit, and the second largest logits are."""
        prompt = self.prompts[index]
        with torch.inference_mode():
            whole = self.model(torch.tensor([prompt + answer], device=self.device), use_cache=False).logits[0].float()
        logits = whole[len(prompt) - 1 : -1]
        largest = logits.topk(2).values
        chosen = logits.gather(1, torch.tensor(answer, device=self.device)[:, None])[:, 0]
        return (largest[:, 0] - chosen).tolist(), (largest[:, 0] - largest[:, 1]).tolist()

    def compare(self, name: str, found: Answers, expected: dict[str, Answers]) -> None:
        """Print where and by how much outputs diverge from expected ones."""
        gaps = [self.below(i, answer)[0] for i, answer in enumerate(found)]
        for how, other in expected.items():
            alike = [[x == y for x, y in zip(a, b, strict=True)] for a, b in zip(other, found, strict=True)]
            parted = {i: one.index(False) for i, one in enumerate(alike) if not all(one)}
            by = [round(gaps[i][first], 4) for i, first in parted.items()]
            print(
                f"{name} against {how}: {sum(map(all, alike))} of {len(alike)} answers and {sum(map(sum, alike))} of "
                f"{len(alike) * NEW} tokens are equal; diverged at {list(parted.values())}, by {by}"
            )
        every = [gap for one in gaps for gap in one]
        print(
            f"{name}: {sum(gap == 0 for gap in every)} of {len(every)} tokens are generate's largest logit after the "
            f"same tokens, {max(every):.4f} the furthest below it",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode")
    parser.add_argument("--source", help="a Llama's folder")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, for a quick start")
    parser.add_argument("--captured", type=int, nargs="+", help="CUDA graph sizes, for a quick start")
    parser.add_argument("--memory", type=float, default=0.3, help="the part of a GPU's memory")
    parser.add_argument("--cache", type=float, help="GiB of KV cache, if engines share a GPU")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs (tensor parallelism)")
    parser.add_argument("--engine", type=json.loads, default={}, help="more vLLM engine arguments, as JSON")
    args = parser.parse_args()
    args.layers, args.model = None, "llama-3-8b"  # of a model that is not made here
    source = args.source or random_llama()
    folder, model = quantized(args.mode, source, args.dtype)
    here = Generated(model, prompts_of(source))
    expected = here.all_answers(static=args.eager)
    for how, found in expected.items():
        if how != "generate":
            here.compare(f"{args.mode}, {how}", found, {"generate": expected["generate"]})
    settings: dict[str, object] = {
        "load_format": "auto", "max_model_len": CONTEXT, "max_num_seqs": 8, "max_num_batched_tokens": 512,
        "dtype": args.dtype, "gpu_memory_utilization": args.memory, "enforce_eager": args.eager,
        **({"kv_cache_memory_bytes": int(args.cache * 2**30)} if args.cache else {}), **args.engine,
    }  # fmt: skip
    llm = engine(args.mode, args, folder, in_process=args.ranks == 1, **settings)
    given = [{"prompt_token_ids": prompt} for prompt in here.prompts]
    for how, asked in (("vLLM together", [given]), ("vLLM alone", [[one] for one in given])):
        done = [answer for some in asked for answer in llm.generate(some, greedy(NEW), use_tqdm=False)]
        here.compare(f"{args.mode}, {how}", [list(answer.outputs[0].token_ids) for answer in done], expected)


if __name__ == "__main__":
    main()
