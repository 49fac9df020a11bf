"""anybit as a vLLM plug-in: after ``pip install 'anybit[vllm]'``, ``vllm serve FOLDER`` runs folders of anybit.

vLLM calls ``register`` in each of its processes (entry point group ``vllm.general_plugins``). vLLM's layers are
imported only then. There is no arithmetic here: layers run ``anybit.ops``.
"""

import functools
import logging
import os

_logger = logging.getLogger("vllm.anybit")


def register() -> None:
    """Register the quantization method "anybit" with vLLM; if that fails, logs why and leaves vLLM usable."""
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from anybit.vllm import streams
        from anybit.vllm.config import AnyBitConfig
    except ImportError as error:
        _logger.warning("anybit does not support this version of vLLM and is not registered: %s", error)
        return
    register_quantization_config("anybit")(AnyBitConfig)
    streams.install()
    _leave_threads_behind()
    try:
        from anybit.vllm import kv_cache
    except ImportError as error:
        _logger.warning("anybit's KV cache does not support this version of vLLM and is disabled: %s", error)
        return
    kv_cache.install()


@functools.cache
def _leave_threads_behind() -> None:
    """Run torch single-threaded in forked processes: its thread pool does not survive a fork, and using it deadlocks.

    vLLM forks its engine and ranks from a process in which anybit has used that pool to check a checkpoint. vLLM itself
    sets ranks to one thread, but not if OMP_NUM_THREADS is set.
    """
    import torch

    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
