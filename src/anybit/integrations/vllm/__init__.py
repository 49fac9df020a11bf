"""anybit inside vLLM: ``pip install 'anybit[vllm]'``, then ``vllm serve FOLDER`` runs what anybit quantized.

vLLM calls ``register`` in each of its processes (entry point group ``vllm.general_plugins``). This package imports
vLLM's layers only from there on, and does no arithmetic: layers run ``anybit.ops``.
"""

import functools
import logging
import os

_logger = logging.getLogger("vllm.anybit")


def register() -> None:
    """Make vLLM know the quantization method "anybit"; says why if it cannot, and leaves vLLM usable."""
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from anybit.integrations.vllm import streams
        from anybit.integrations.vllm.config import AnyBitConfig
    except ImportError as error:
        _logger.warning("anybit does not know this version of vLLM, and is not registered with it: %s", error)
        return
    register_quantization_config("anybit")(AnyBitConfig)
    streams.install()
    _leave_threads_behind()
    try:
        from anybit.integrations.vllm import kv_cache
    except ImportError as error:
        _logger.warning("anybit's KV cache does not know this version of vLLM, and is not there: %s", error)
        return
    kv_cache.install()


@functools.cache
def _leave_threads_behind() -> None:
    """Have forked processes work without torch's threads, which stay behind: whoever uses them waits for ever.

    vLLM forks an engine, and its ranks, from processes that have checked a checkpoint by them; it takes one thread for
    ranks itself, but not where OMP_NUM_THREADS is set.
    """
    import torch

    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
