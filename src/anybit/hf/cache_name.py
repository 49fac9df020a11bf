"""The name of the cache argument of a transformers model: ``past_key_values`` up to 5.23, ``cache`` since 5.24."""

from collections.abc import Mapping

import transformers

CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
"""The name in the installed version of transformers; 5.24 and later also accept the older one."""


def cache_of(arguments: Mapping[str, object]) -> transformers.Cache | None:
    """The cache among the keyword arguments of a model call, by either name; None if there is none."""
    found = arguments.get("cache")
    return arguments.get("past_key_values") if found is None else found
