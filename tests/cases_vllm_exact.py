"""A small Llama whose outputs do not depend on summation order, in a vLLM engine and in anybit's own generate.

Everything but rounding to a KV cache's 16-bit tokens is computed in float64. Other summation orders then differ
by 1e-16 rather than 1e-7, so no value rounds differently, and an engine's greedy tokens must match
those of ``generate`` one for one whatever the scheduler does: chunks, prefix hits, preemption, drafts.

    python tests/cases_vllm_exact.py kv4 [chunks hits ...]      print one line of JSON per scenario
    python tests/cases_vllm_exact.py kv4 --model FOLDER --text FILE     a real Llama, on a real text
    python tests/cases_vllm_exact.py kv4 --kernels ...          as users run it: float16, with anybit's kernels on a GPU

Exact outputs come from plain torch in float64 on GPUs, too. With --kernels, summation order does change outputs, so
each token of the engine is also compared with generate's logits after the same tokens: how many are the largest,
and how far below it the others are. The same is reported for generate itself in float32, which only
rounds differently. Every scenario is a process; it is an error if it does not happen (no preemption, no hit, no
accepted draft) or, in float64, if outputs differ.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LIVES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1, "max_num_batched_tokens": 2048},
    "together": {},
    "chunks": {"max_num_batched_tokens": 67},
    "hits": {"enable_prefix_caching": True, "max_num_batched_tokens": 200},
    "preempted": {"tight": True, "enable_prefix_caching": True},
    "drafts": {"speculative_config": DRAFTS, "enable_prefix_caching": True},
    "everything": {"speculative_config": DRAFTS, "enable_prefix_caching": True, "tight": True,
                   "max_num_batched_tokens": 67},
}  # fmt: skip
"""Scenarios, as engine options; tight: a pool for the first prompts, without room for their outputs."""
COUNTS = {
    "hits": "prefix_cache_hits",
    "preempted": "num_preemptions",
    "drafts": "spec_decode_num_accepted_tokens",
    "drafted": "spec_decode_num_draft_tokens",
}
HAPPENS = {"hits": ("hits",), "preempted": ("preempted",), "drafts": ("drafts",)}
HAPPENS["everything"] = tuple(HAPPENS)
"""Counts of a scenario that must not be zero."""
SIZE = 16
LONGEST = 1024
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def save_model(folder: Path) -> Path:
    """Random weights, with queries and keys large enough that attention peaks and old pages matter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=SIZE, max_position_embeddings=LONGEST, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    wide = {"embed_tokens": 128**0.5, "q_proj": 2.5, "k_proj": 2.5, "o_proj": 1.0}
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.data.normal_(0, wide.get(name.split(".")[-2], 1.0) / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return folder


Asked = tuple[list[int], int]


def requests(seed: int = 3, count: int = 10) -> list[Asked]:
    """Prompts with shared prefixes, and how many tokens to generate. Some repeat themselves, for drafts."""
    draw = random.Random(seed)
    begins = [[draw.randrange(3, SIZE) for _ in range(n)] for n in (384, 300, 128)]
    found = []
    for i in range(count):
        end = [draw.randrange(3, SIZE) for _ in range(draw.choice((1, 40, 127, 129)))]
        prompt = begins[i % 3][: draw.choice((LONGEST, 256))] + (end[:20] * 3 if i % 4 == 1 else end)
        found.append((prompt, draw.choice((20, 100, 180))))
    return found


def requests_of(folder: Path, text: Path) -> list[Asked]:
    """The same for a real model: a text continues after shared prefixes."""
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(folder)(text.read_text()[:20_000]).input_ids
    cuts = [(0, 250, 40), (0, 370, 40), (400, 520, 30), (900, 910, 40), (0, 380, 40), (400, 650, 30), (0, 300, 20)]
    cuts.append((400, 775, 40))  # most answers fill a page
    return [(words[a:b], new) for a, b, new in cuts]


def tight(format: str, asked: list[Asked], head_dim: int, slack: int) -> int:
    """Blocks for the first half's prompts, counting shared pages once: one of its outputs must run out of pages."""
    from anybit.ops import kv_rows
    from anybit.scheme import KVFormat

    rows = kv_rows.layout(KVFormat.parse(format), head_dim, slack)
    prompts = [prompt for prompt, _ in asked[: len(asked) // 2]]
    fronts = sum(rows.front if len(p) >= 128 else min(rows.front, -(-len(p) // rows.slots)) for p in prompts)
    pages = {tuple(p[: 128 * i + 128]) for p in prompts for i in range(len(p) // 128)}
    longest = max(len(prompt) + new + slack for prompt, new in asked)
    return 1 + max(fronts + len(pages), rows.front + -(-longest // 128))  # and the null block


class Doubled(nn.Module):
    """transformers' Llama in float64 for vLLM, except its attention, which is the engine's."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        from vllm.model_executor.layers.attention import Attention

        super().__init__()
        config = vllm_config.model_config.hf_config
        config.torch_dtype = torch.float64
        self.whole = LlamaForCausalLM(config)
        self.attention = nn.ModuleList(
            Attention(
                config.num_attention_heads, config.head_dim, config.head_dim**-0.5, config.num_key_value_heads,
                cache_config=vllm_config.cache_config, quant_config=None, prefix=f"layers.{i}.attn",
            )
            for i in range(config.num_hidden_layers)
        )  # fmt: skip

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.whole.model.embed_tokens(input_ids)

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Tensor:
        model = self.whole.model
        x = model.embed_tokens(input_ids)
        turned = model.rotary_emb(x[None], positions[None])
        for layer, attention in zip(model.layers, self.attention, strict=True):
            block, h = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                part(h).view(1, len(h), -1, block.head_dim).transpose(1, 2)
                for part in (block.q_proj, block.k_proj, block.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, *turned)
            q, k, v = (part[0].transpose(0, 1).flatten(1).contiguous() for part in (q, k, v))
            x = x + block.o_proj(attention(q, k, v))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return model.norm(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.whole.lm_head(hidden_states).float()

    def load_weights(self, weights: Any) -> set[str]:
        self.whole.load_state_dict(dict(weights), strict=not self.whole.config.tie_word_embeddings)
        self.whole.tie_weights()
        self.whole.double()
        turn_alike(self.whole)
        return {f"whole.{name}" for name, _ in self.whole.named_parameters()}


def turn_alike(model: Any) -> None:
    """Rotary frequencies as computed on a CPU: a GPU's powers may differ in the last bit."""
    with torch.device("cpu"):
        found = LlamaRotaryEmbedding(model.config).inv_freq
    model.model.rotary_emb.inv_freq.copy_(found)


def in_float64() -> None:
    """Make both programs attend in float64, over the values in the cache, without kernels, even on a GPU."""
    from anybit.cache import attention
    from anybit.cache import blocks as kvrows
    from anybit.vllm.kv_backend import RowBuilder
    from anybit.vllm.kv_step import Batch

    plain = attention.attend

    def build(_: RowBuilder, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        m = common_attn_metadata
        batch = Batch(m.block_table_tensor, m.seq_lens, m.query_start_loc, m.num_actual_tokens, 0, 0)
        batch.in_rows()
        return batch

    def decode(q: Tensor, cache: Any, layer: int, sequences: Any, masks: Any, split: int = 0) -> tuple[Tensor, Tensor]:
        return attention.decode_reference(q, cache, layer, sequences, masks)

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return plain(q.double(), k.double(), v.double(), *rest)

    def product(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, enable_gqa: bool) -> Tensor:
        assert is_causal and enable_gqa
        found = attend(q[0].transpose(0, 1), k[0], v[0], attention.Masks(scale=scale))[0]
        return found.transpose(0, 1)[None].to(q.dtype)

    def norm(self: Any, x: Tensor) -> Tensor:  # transformers' own goes through float32
        return self.weight * x * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    LlamaRMSNorm.forward = norm
    attention.attend = kvrows.attend = attend
    attention.decode_kernel, RowBuilder.build = decode, build
    torch.nn.functional.scaled_dot_product_attention = product  # of a whole prompt, in generate


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    """The model in transformers, attending over an AnyBitCache."""
    import anybit.hf.cache  # noqa: F401  (whose attention it is)

    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE)
    model.set_attn_implementation("anybit")
    turn_alike(model)
    return model


def by_generate(model: Any, format: str, asked: list[Asked]) -> list[list[int]]:
    """Greedy outputs of anybit's own generate. Prompts are fed page by page, so that they read older pages packed."""
    from anybit.hf.cache import AnyBitCache

    found = []
    for prompt, new in asked:
        cache = AnyBitCache(format, config=model.config)
        answer = model.generate(
            torch.tensor([prompt], device=DEVICE), past_key_values=cache, max_new_tokens=new, min_new_tokens=new,
            do_sample=False, prefill_chunk_size=128, pad_token_id=0,
        )  # fmt: skip
        found.append(answer[0, len(prompt) :].tolist())
    return found


@torch.inference_mode()
def below_the_largest(model: Any, format: str, asked: list[Asked], answers: list[list[int]]) -> list[float]:
    """How far each output token is below the largest logit of generate's model, after the same tokens."""
    from anybit.hf.cache import AnyBitCache

    gaps = list[float]()
    for (prompt, _), answer in zip(asked, answers, strict=True):
        tokens, cache = torch.tensor([prompt + answer], device=DEVICE), AnyBitCache(format, config=model.config)
        logits = torch.cat([model(piece, past_key_values=cache).logits[0].float() for piece in tokens.split(128, 1)])
        logits = logits[len(prompt) - 1 : -1]
        gaps += (logits.amax(-1) - logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]).tolist()
    return gaps


class LastTime:
    """Replaces vLLM's n-gram drafter, which needs numba: proposes what last followed the last token."""

    def __init__(self, config: Any) -> None:
        self.count = config.speculative_config.num_speculative_tokens

    def propose(self, count: int, sampled: Any, lengths: Any, tokens: Any, slot_mappings: object = None) -> list[Any]:
        """Draft tokens of each request that has sampled a token."""
        found = []
        for i, new in enumerate(sampled):
            known = tokens[i, : lengths[i]]
            places = (known[: -count - 1] == known[-1]).nonzero()[0] if len(new) else ()
            first = places[-1] + 1 if len(places) else len(known) - count
            found.append(known[first : first + count].tolist() if len(new) else [])
        return found

    def load_model(self, *_: object, **__: object) -> None:
        """Do nothing."""


def draft_without_numba() -> None:
    """Replace vLLM's n-gram drafter if numba is missing."""
    if find_spec("numba") is None:
        module: Any = types.ModuleType("vllm.v1.spec_decode.ngram_proposer")
        module.NgramProposer = LastTime
        sys.modules[module.__name__] = module


def by_vllm(
    folder: Path, format: str, asked: list[Asked], life: dict[str, Any], kernels: bool = False
) -> tuple[list[list[int]], dict[str, float]]:
    """Greedy outputs of an engine, and its counts of scenario events."""
    draft_without_numba()
    from transformers import AutoConfig
    from vllm import LLM, ModelRegistry, SamplingParams

    from anybit.vllm import register

    register()
    ModelRegistry.register_model("Doubled", Doubled)
    options = {
        "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": LONGEST, "max_num_seqs": 12,
        "max_num_batched_tokens": 512, "num_gpu_blocks_override": 400, "enable_prefix_caching": False,
        "enforce_eager": True, "disable_log_stats": False, "gpu_memory_utilization": 0.2,
    }  # fmt: skip
    if DEVICE == "cuda":  # other engines may share it
        options |= {"gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 512 << 20}
    if kernels:
        options |= {"dtype": "float16", "enforce_eager": DEVICE == "cpu"}
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY" if DEVICE == "cuda" else "NONE",
        }
    life = dict(life)
    if life.pop("tight", False):
        slack = 32 if "speculative_config" in life else 0
        life["num_gpu_blocks_override"] = tight(format, asked, AutoConfig.from_pretrained(folder).head_dim, slack)
    more: dict[str, Any] = {"additional_config": {"anybit_kv_cache": format}}
    if not kernels:
        more["hf_overrides"] = {"architectures": ["Doubled"]}
    llm = LLM(str(folder), **{**options, **more, **life})
    given = [({"prompt_token_ids": prompt}, new) for prompt, new in asked]
    found = []
    for half in (given[: len(given) // 2], given[len(given) // 2 :]):  # so that the second finds the first's pages
        sampling = [
            SamplingParams(temperature=0, min_tokens=n, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in half
        ]
        found += llm.generate([prompt for prompt, _ in half], sampling, use_tqdm=False)
    values = {m.name.removeprefix("vllm:"): getattr(m, "value", 0) for m in llm.get_metrics()}
    return [list(one.outputs[0].token_ids) for one in found], {k: values.get(name, 0) for k, name in COUNTS.items()}


def compared(expected: list[list[int]], found: list[list[int]]) -> dict[str, Any]:
    """How many tokens match, and which outputs diverge."""
    pairs = list(zip(expected, found, strict=True))
    alike = sum(a == b for x, y in pairs for a, b in zip(x, y, strict=True))
    parted = [i for i, (x, y) in enumerate(pairs) if x != y]
    return {"alike": alike, "tokens": sum(map(len, expected)), "parted": parted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format")
    parser.add_argument("lives", nargs="*", help=", ".join(LIVES))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--most", type=int, default=LONGEST, help="tokens of an answer at most")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--answers", type=Path, help="of one life: write its answers here, and compare nothing")
    args = parser.parse_args()
    folder = args.model or save_model(Path(tempfile.mkdtemp()))
    asked = requests_of(folder, args.text) if args.text else requests()
    asked = [(prompt, min(new, args.most)) for prompt, new in asked]
    if not args.kernels:
        in_float64()
    if args.answers:
        found, counts = by_vllm(folder, args.format, asked, LIVES[args.lives[0]], args.kernels)
        args.answers.write_text(json.dumps([found, counts]))
        os._exit(0)  # a clean engine shutdown takes seconds
    lives, logs = args.lives or list(LIVES), Path(tempfile.mkdtemp())

    def start(life: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, __file__, args.format, life, "--model", str(folder), "--answers", str(logs / life)]
        command += ["--most", str(args.most)]
        command += ["--kernels"] * args.kernels + (["--text", str(args.text)] if args.text else [])
        return subprocess.Popen(command, stdout=(logs / f"{life}.log").open("w"), stderr=subprocess.STDOUT)

    begin = time.monotonic()
    children = {life: start(life) for life in lives if DEVICE == "cuda"}  # on a CPU one after another
    model = loaded(folder, torch.float16 if args.kernels else torch.float64)
    expected = by_generate(model, args.format, asked)
    said: dict[str, Any] = {"format": args.format}
    print(json.dumps({**said, "generate": round(time.monotonic() - begin)}), flush=True)
    failed = list[str]()

    def below(found: list[list[int]]) -> dict[str, Any]:
        gaps = below_the_largest(model, args.format, asked, found)
        return {"largest": sum(gap == 0 for gap in gaps), "furthest": round(max(gaps), 4)}

    if args.kernels:
        found = by_generate(loaded(folder, torch.float32), args.format, asked)
        print(json.dumps({**said, "life": "generate in float32", **compared(expected, found), **below(found)}))
    for life in lives:
        child = children.get(life) or start(life)
        if child.wait():
            failed.append(f"{life} ended with {child.returncode}:\n" + (logs / f"{life}.log").read_text()[-3000:])
            continue
        found, counts = json.loads((logs / life).read_text())
        line = {**said, "life": life, **compared(expected, found), **counts}
        line |= below(found) if args.kernels else {}
        print(json.dumps({**line, "seconds": round(time.monotonic() - begin)}), flush=True)
        failed += [f"{life}: {name} did not happen" for name in HAPPENS.get(life, ()) if not counts[name]]
        failed += [f"{life}: answers {line['parted']} part"] if line["parted"] and not args.kernels else []
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
