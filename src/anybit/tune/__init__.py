"""Which kernel and config runs a product: the space of them, the search, the maps it writes, and the look-up."""
