"""Low-bit KV caches: which token lies where, in plain torch, and attention over them."""
