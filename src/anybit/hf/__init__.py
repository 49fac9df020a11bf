"""Adapters to the libraries that run models. No arithmetic here."""

# First, before any adapter is half imported: importing this triggers anybit's registration, which imports adapters.
import transformers.modeling_utils as _  # noqa: F401
