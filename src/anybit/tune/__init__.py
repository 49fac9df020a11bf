"""The search that measures which kernel and config runs a product fastest, and what explains a choice."""
