"""Pion: a shared KV cache for language models."""

__version__ = "0.1.0"
