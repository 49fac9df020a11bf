"""Which kernel and config run a product."""
