"""What the V, KV.PREFIX and SSM families share: the feature gate, formats, namespaces and their prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pion import limits
from pion.commands import args
from pion.errors import CommandError

if TYPE_CHECKING:
    from pion.commands.dispatch import Context

#: The formats published clients know; a text that lists them is matched on, so it does not grow with ours.
ACCEPTED_FORMATS: Final = "(want int8|turbo4|turbo3|turbo2|fp16|fp8|mlx4g32), or bf16|fp32"  # begins as published
HYBRID: Final = "bf16_rope_fp8_body"


def requires(command: str, arguments: str) -> CommandError:
    """Too few arguments: every command of these families has its own text instead of an arity."""
    return CommandError(f"ERR {command} requires: {arguments}")


def acknowledged(ctx: Context, value: Any) -> Any:
    """The reply of a command that changed something: with `appendfsync always` it waits for the medium.

    The flush serves every command that waits at the same time.
    """
    return ctx.server.commit.later(ctx, value) if ctx.engine.always and ctx.engine.deferred_sync else value


def engine(ctx: Context, *, hint: bool = True) -> Any:
    """The engine, when the server was started with `--kvcache`.

    Args:
        hint: whether the refusal names the flag; which commands name it is part of the published behaviour.

    Raises:
        CommandError: without `--kvcache`.
    """
    if not ctx.engine.kvcache:
        raise CommandError("ERR V-store not enabled (use --kvcache)" if hint else "ERR V-store not enabled")
    return ctx.engine


def namespace(ctx: Context, raw: bytes, *, bounded: bool = True) -> bytes:
    """A namespace argument.

    Args:
        bounded: whether the length is checked; LOOKUP, DROP and OWNER just do not find a longer one.

    Raises:
        CommandError: length, or `--ns-prefix`.
    """
    if bounded and not 1 <= len(raw) <= limits.MAX_NAMESPACE:
        raise CommandError(f"ERR ns_key length must be 1..{limits.MAX_NAMESPACE}")
    prefix = ns_prefix(ctx)
    if not raw.startswith(prefix):
        raise CommandError(
            f"ERR namespace must start with required prefix '{args.text(prefix)}' (multi-tenant isolation)"
        )
    return raw


def ns_prefix(ctx: Context) -> bytes:
    """What every namespace must begin with."""
    prefix = getattr(ctx.options, "ns_prefix", "") or ""
    return prefix.encode("utf-8", "surrogateescape") if isinstance(prefix, str) else bytes(prefix)


def stored_format(command: str, name: str, unknown: CommandError) -> int:
    """The code of a format for all layers.

    Args:
        command: for the text, `V.CREATE` or `KV.PREFIX.REGISTER`.
        name: lower case.
        unknown: raised for a name that is no format at all.

    Raises:
        CommandError: `unknown`, or that `native` is the client's word.
    """
    if name == "native":
        raise CommandError(
            f"ERR {command}: VQUANT 'native' is chosen by the client: send the model's own fp16, bf16 or fp32"
        )
    if name not in limits.BUILT_FORMATS:
        raise unknown
    return limits.FORMATS[name]


def permissive_int(raw: bytes) -> int:
    """The lenient integers of V.CREATE (blanks, `+`, leading zeros); -1 for anything else."""
    try:
        return int(raw)
    except ValueError:
        return -1


def bounded(raw: bytes, low: int, high: int, name: str) -> int:
    """A strict integer in [low, high].

    Raises:
        CommandError: not an integer, or `ERR <name> out of range (<low>..<high>)`.
    """
    value = args.integer(raw)
    if not low <= value <= high:
        raise CommandError(f"ERR {name} out of range ({low}..{high})")
    return value


def prefill_ms(raw: bytes) -> int:
    """Milliseconds of a measured prefill, at most one day."""
    return bounded(raw, 0, limits.MAX_PREFILL_MS, "PREFILL_MS")


def digest(raw: bytes) -> str:
    """A digest as lower-case hex.

    Raises:
        CommandError: not 2..128 hex digits, or an odd number of them.
    """
    text = bytes(raw).decode("latin-1").lower()
    if not 2 <= len(text) <= 128 or len(text) % 2 or not set(text) <= set("0123456789abcdef"):
        raise CommandError("ERR DIGEST must be 2..128 hex digits")
    return text
