"""A demonstration with a real model."""
