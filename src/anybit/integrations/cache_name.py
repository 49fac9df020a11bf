"""What transformers calls the cache in a model's call: ``past_key_values`` until 5.23, ``cache`` since."""

from collections.abc import Mapping
from typing import Any

import transformers

CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
"""The name of this version of transformers; since 5.24 it takes the older one, too."""


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a model's call, by either name; None where there is none."""
    found = arguments.get("cache")
    return arguments.get("past_key_values") if found is None else found
