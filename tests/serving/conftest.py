"""What tests of the plug-in share: vLLM's configuration, and ranks."""

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def vllm_config() -> Iterator[None]:
    """vLLM's layers must be created within a configuration."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is vLLM's only rank, and loads models with anybit's plug-in."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    from anybit.vllm import register

    os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"})
    torch.accelerator.empty_cache = lambda: None  # as vLLM's own worker does on a CPU
    register()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('group') / 'file'}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this process rank I of N for vLLM's layers."""
    import cases_vllm

    return cases_vllm.ranks(monkeypatch)
