"""Small random hybrid models in vLLM: attention over anybit's rows beside layers with recurrent state.

    python tests/cases_vllm_hybrid.py NAME FORMAT    prints one line of JSON; NAME: falcon-h1, lfm2 ...

The same engine with vLLM's own cache and with anybit's, and greedy outputs of both. Each token with anybit's is
also compared with the logits over vLLM's cache after the same tokens. In "kv16" both caches hold the same values; at
fewer bits, outputs decoded token by token are compared with those of one prefill over them, which unpacks its pages.
Prefills update states differently: the difference between vLLM's own decode and prefill is the yardstick for both.
"""

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch

GPU = torch.cuda.is_available()
LONGEST, SIZE = 1024, 512
ATTENTION = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": SIZE,
    "max_position_embeddings": LONGEST, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "intermediate_size": 256,
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_expand": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-h1": ("falcon_h1", {"num_hidden_layers": 2, "mamba_d_ssm": 512, **MAMBA2}),
    "granite-4": (
        "granitemoehybrid",
        {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0,
         "shared_intermediate_size": 256, **MAMBA2},
    ),
    "lfm2": (
        "lfm2",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "conv_dim": 256,
         "block_dim": 256, "block_auto_adjust_ff_dim": False},
    ),
    "qwen3-next": (
        "qwen3_next",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    ),
}  # fmt: skip
WIDE = {"embed_tokens": 16.0, "q_proj": 2.5, "k_proj": 2.5}


def save(name: str, folder: Path) -> Path:
    """A model whose attention peaks, so that old pages matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, more = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**ATTENTION, **more}))
    for path, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.data.normal_(0, WIDE.get(path.split(".")[-2], 1.0) / weight.shape[1] ** 0.5)
    model.to(torch.float16 if GPU else torch.float32).save_pretrained(folder)
    return folder


def engine(folder: Path, format: str | None, eager: bool = False, most: int = 8) -> Any:
    """An engine for ``most`` concurrent requests; format None: vLLM's own cache."""
    from vllm import LLM

    from anybit.vllm import register

    register()
    options: dict[str, Any] = {"additional_config": {"anybit_kv_cache": format}} if format else {}
    eager |= not GPU
    if GPU:
        options |= {"kv_cache_memory_bytes": 512 << 20, "gpu_memory_utilization": 0.03}
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "NONE" if eager else "FULL_DECODE_ONLY"}
    return LLM(
        str(folder), skip_tokenizer_init=True, dtype="float16" if GPU else "float32", max_model_len=LONGEST,
        max_num_seqs=most, max_num_batched_tokens=256, enforce_eager=eager, disable_log_stats=True,
        enable_prefix_caching=False,
        **{"gpu_memory_utilization": 0.2, **options},
    )  # fmt: skip


def answers(llm: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, min_tokens=new, max_tokens=new, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done]


def below_the_largest(llm: Any, prompts: list[list[int]], found: list[list[int]]) -> list[float]:
    """How far each output token is below the largest logit of an engine, in a prefill over the outputs."""
    from vllm import SamplingParams

    again = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    gaps = list[float]()
    for prompt, answer in zip(prompts, found, strict=True):
        (done,) = llm.generate([{"prompt_token_ids": prompt + answer}], again, use_tqdm=False)
        said = list(zip(done.prompt_token_ids, done.prompt_logprobs, strict=True))[len(prompt) :]
        gaps += [
            max(entry.logprob for entry in logprobs.values()) - logprobs[token].logprob for token, logprobs in said
        ]
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("format")
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--most", type=int, default=8, help="requests at once")
    args = parser.parse_args()
    folder = save(args.name, Path(tempfile.mkdtemp()))
    draw = random.Random(0)
    prompts = [[draw.randrange(3, SIZE) for _ in range(n)] for n in (5, 100, 127, 128, 300, 513)]
    plain = engine(folder, None, args.eager, args.most)
    expected = answers(plain, prompts, args.new)
    packed = engine(folder, args.format, args.eager, args.most)
    found = answers(packed, prompts, args.new)
    same = [[a == b for a, b in zip(x, y, strict=True)] for x, y in zip(expected, found, strict=True)]
    alike, until = sum(map(sum, same)), [[*one, False].index(False) for one in same]
    said = {"model": args.name, "format": args.format, "tokens": args.new * len(prompts)}
    said |= {"alike": alike, "alike until": until, "distinct": len({token for one in found for token in one})}
    asked = {"beside 16 bits": (plain, found), "beside its prompts": (packed, found)}
    asked["16 bits beside their prompts"] = (plain, expected)
    for what, (llm, answered) in asked.items():
        gaps = below_the_largest(llm, prompts, answered)
        said |= {what: {"largest": sum(gap == 0 for gap in gaps), "furthest": round(max(gaps), 4)}}
    print(json.dumps(said), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
