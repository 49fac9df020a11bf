"""Configurations of tiny mixtures of experts, by model_type."""

COMMON = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
_QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 40}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24}
_DEEPSEEK = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 40, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MODELS = {
    "mixtral": _MIXTRAL,
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 24, "norm_topk_prob": True},
    "qwen3_moe": {**_QWEN, "norm_topk_prob": True},
    "olmoe": {**_MIXTRAL, "num_experts": 8},
    "phimoe": _MIXTRAL,
    "gpt_oss": _MIXTRAL,
    "deepseek_v2": {**_DEEPSEEK, **_MLA, "topk_method": "greedy"},
    "deepseek_v3": {**_DEEPSEEK, **_MLA},
    "glm4_moe": _DEEPSEEK,
    "granitemoe": _MIXTRAL,
    "llama4_text": {**_MIXTRAL, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 1},
    "qwen3_next": {**_QWEN, **_LINEAR, "shared_expert_intermediate_size": 24, "norm_topk_prob": True},
    "lfm2_moe": {**_QWEN, "num_dense_layers": 0, "layer_types": ["full_attention"] * 2},
}
