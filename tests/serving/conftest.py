"""What tests of the plug-in share: vLLM's configuration, and ranks."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def vllm_config() -> Iterator[None]:
    """vLLM's layers must be created within a configuration."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this process rank I of N for vLLM's layers."""
    import cases_vllm

    return cases_vllm.ranks(monkeypatch)
