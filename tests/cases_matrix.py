"""Tiny configurations of popular causal language models, with what makes each special."""

from collections.abc import Callable
from typing import Any

import transformers as t

SIZES = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BODY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, **BODY, "num_key_value_heads": 2, "max_position_embeddings": 64}
WIDE = {**LLAMA, "head_dim": 16}
LINEAR = {  # gated delta nets: three of four layers have linear attention
    **WIDE,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}

TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {**TOWER, "image_size": 16, "patch_size": 8}
VISUAL = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8,
}  # fmt: skip
LLAMA4 = {
    **WIDE, "intermediate_size_mlp": 96, "num_local_experts": 2, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32,
}  # fmt: skip
GEMMA4 = {
    **WIDE, "global_head_dim": 16, "sliding_window": 16, "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 16,
}  # fmt: skip
LATENT = {  # MLA: one latent vector for keys and values of all heads; the first MLP is dense, the second has experts
    **LLAMA, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip

MATRIX: dict[str, Callable[[], Any]] = {
    "Llama": lambda: t.LlamaConfig(**LLAMA),
    "Llama 4 (text)": lambda: t.Llama4TextConfig(**LLAMA4),
    "Llama 4 (images)": lambda: t.Llama4Config(
        text_config=LLAMA4,
        vision_config={
            **PATCHES, "intermediate_size": 128, "vision_output_dim": 64, "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
    ),
    "Mistral": lambda: t.MistralConfig(**LLAMA),
    "Ministral": lambda: t.MinistralConfig(**WIDE, sliding_window=16),
    "Ministral 3": lambda: t.Ministral3Config(**WIDE),
    "Mistral Small 3.1 (images)": lambda: t.Mistral3Config(
        text_config={"model_type": "mistral", **LLAMA},
        vision_config={"model_type": "pixtral", **PATCHES, "head_dim": 16},
    ),
    "Qwen2, Qwen2.5": lambda: t.Qwen2Config(**LLAMA),
    "Qwen3": lambda: t.Qwen3Config(**WIDE),
    "Qwen3-Next": lambda: t.Qwen3NextConfig(**LINEAR, **EXPERTS, shared_expert_intermediate_size=32),
    "Qwen3.5 (text)": lambda: t.Qwen3_5TextConfig(**LINEAR),
    "Qwen3.5 (images)": lambda: t.Qwen3_5Config(
        text_config=LINEAR, vision_config={**VISUAL, "num_position_embeddings": 16}
    ),
    "Qwen3-VL (images)": lambda: t.Qwen3VLConfig(
        text_config=WIDE, vision_config={**VISUAL, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    ),
    "Gemma 2": lambda: t.Gemma2Config(**WIDE, sliding_window=16),
    "Gemma 3 (text)": lambda: t.Gemma3TextConfig(**WIDE, sliding_window=16),
    "Gemma 3 (images)": lambda: t.Gemma3Config(
        text_config={**WIDE, "sliding_window": 16}, vision_config=PATCHES, mm_tokens_per_image=4
    ),
    "Gemma 4 (text)": lambda: t.Gemma4TextConfig(**GEMMA4),
    "Gemma 4 (images)": lambda: t.Gemma4Config(
        text_config=GEMMA4, vision_config={**TOWER, "num_key_value_heads": 2, "head_dim": 16}, audio_config=None
    ),
    "Phi-3, Phi-4": lambda: t.Phi3Config(**LLAMA),
    "OLMo 2": lambda: t.Olmo2Config(**LLAMA),
    "OLMo 3": lambda: t.Olmo3Config(**LLAMA, sliding_window=16),
    "Granite": lambda: t.GraniteConfig(**LLAMA),
    "GLM-4": lambda: t.Glm4Config(**WIDE),
    "SmolLM3": lambda: t.SmolLM3Config(**LLAMA),
    "Falcon-H1": lambda: t.FalconH1Config(
        **LLAMA, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16
    ),
    "OPT": lambda: t.OPTConfig(
        **SIZES, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64,
        max_position_embeddings=64,
    ),
    "BLOOM": lambda: t.BloomConfig(**SIZES, hidden_size=64, n_layer=2, n_head=4),
    "GPT-2": lambda: t.GPT2Config(**SIZES, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    "Mixtral": lambda: t.MixtralConfig(**LLAMA, num_local_experts=4),
    "Qwen3-MoE": lambda: t.Qwen3MoeConfig(**WIDE, **EXPERTS),
    "gpt-oss": lambda: t.GptOssConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    "Cohere 2": lambda: t.Cohere2Config(**LLAMA, sliding_window=16),
    "EXAONE 4": lambda: t.Exaone4Config(**LLAMA, sliding_window=16),
    "Seed-OSS": lambda: t.SeedOssConfig(**WIDE),
    "InternLM 3": lambda: t.InternLM3Config(**WIDE),
    "ERNIE 4.5": lambda: t.Ernie4_5Config(**WIDE),
    "Hunyuan": lambda: t.HunYuanDenseV1Config(**WIDE),
    "Falcon": lambda: t.FalconConfig(
        **SIZES, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "LFM 2": lambda: t.Lfm2Config(**LLAMA, layer_types=["conv", "full_attention"], block_multiple_of=8),
    "Nemotron-H": lambda: t.NemotronHConfig(
        **WIDE, hybrid_override_pattern="M*-", mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2,
        chunk_size=16,
    ),
    "Granite 4": lambda: t.GraniteMoeHybridConfig(
        **LLAMA, layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16,
        mamba_chunk_size=16, shared_intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
    ),
    "GLM-4.5": lambda: t.Glm4MoeConfig(
        **WIDE, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "Qwen3.5-MoE": lambda: t.Qwen3_5MoeTextConfig(**LINEAR, **EXPERTS, shared_expert_intermediate_size=32),
    "MiniMax-M2": lambda: t.MiniMaxM2Config(**WIDE, num_local_experts=4, num_experts_per_tok=2),
    "DeepSeek-V3": lambda: t.DeepseekV3Config(**LATENT),
    "DeepSeek-V4": lambda: t.DeepseekV4Config(**LATENT, head_dim=16, o_groups=2, o_lora_rank=16),
    "Mistral 4": lambda: t.Mistral4Config(**LATENT),
}  # fmt: skip
