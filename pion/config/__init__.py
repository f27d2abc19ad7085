"""Options of the server: one table drives flags, redis.conf lines, TOML, CONFIG and `--help`."""

from pion.config.options import FIELDS, FIXED, Options, parse_size
from pion.config.parse import HelpRequested, VersionRequested, help_text, parse_args

__all__ = [
    "FIELDS", "FIXED", "HelpRequested", "Options", "VersionRequested", "help_text", "parse_args", "parse_size",
]  # fmt: skip
