"""Adapters to the libraries that run models. No arithmetic here."""

# Before any adapter is half loaded: anybit registers as soon as transformers' models are there, and loads its adapters.
import transformers.modeling_utils as _  # noqa: F401
