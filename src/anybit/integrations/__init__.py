"""Adapters to the libraries that serve models. No arithmetic here."""
