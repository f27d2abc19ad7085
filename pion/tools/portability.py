"""`pion export` and `pion import`: stored prefixes as files of mlx-lm, or as the entry files they are."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pion import __version__
from pion._core import framing
from pion.errors import CommandError, PionError
from pion.limits import BUILT_FORMATS
from pion.store import layout
from pion.tools import places
from pion.tools.newfile import new_file

__all__ = ["export_main", "import_main"]

_EXPORT = """\
Writes a stored prefix to a file.

Without --raw FILE is a prompt cache of mlx-lm (it must end with .safetensors): mlx_lm.models.cache.load_prompt_cache
loads it, with the mlx-lm that is installed here. fp16, bf16 and fp32 are kept word for word; mlx4g32 becomes a
QuantizedKVCache where K and V of a layer are both in it and heads are multiples of 32; other formats are decoded to
fp16 (bf16 beside layers kept in bf16). Only a complete prefix is written.

With --raw FILE is the entry file itself, every stored byte and everything declared, for `pion import --raw` into
another directory. It is read from --dir, which a server may hold meanwhile.
"""

_IMPORT = """\
Stores the prefix in FILE.

Without --raw FILE is a prompt cache of mlx-lm (KVCache and QuantizedKVCache). It is stored in the formats it was
exported from, else word for word: a QuantizedKVCache by its values in the dtype of its scales. Values that are encoded
in a quantized format a second time may come out a little different; --raw keeps every byte.

PionPromptCache finds the prefix if its digest is known: from a file that `pion export` wrote, from --model and
--tokens, or from --digest. Otherwise it is found by its namespace only: Client.fetch, KV.PREFIX.LOOKUP.

With --raw FILE is an entry file from `pion export --raw` or from a data directory: it goes into --dir, which no server
may hold, under the namespace that stands in it.
"""

_Run = Callable[[argparse.Namespace], None]


def export_main(argv: Sequence[str]) -> int:
    """`pion export [options] NS FILE`; the exit status: 0, 1 refused or failed, 2 wrong usage."""
    parser = _parser("export", _EXPORT)
    parser.add_argument("namespace", metavar="NS", type=os.fsencode, help="the prefix")
    parser.add_argument("file", metavar="FILE", type=Path, help="the file to write")
    parser.add_argument("--replace", action="store_true", help="FILE may be there already")
    parser.add_argument("--raw", action="store_true", help="write the entry file itself; needs --dir")
    parser.add_argument("--heads", type=int, metavar="N", help="K/V heads of a row, if it was registered without HEADS")
    parser.add_argument("--model", metavar="ID", help="name the model in the file: mlx_lm.generate asks for it")
    places.add_options(parser)
    return _main(parser, argv, _export)


def import_main(argv: Sequence[str]) -> int:
    """`pion import [options] FILE [NS]`; the exit status: 0, 1 refused or failed, 2 wrong usage."""
    parser = _parser("import", _IMPORT)
    parser.add_argument("file", metavar="FILE", type=Path, help="the file to read")
    parser.add_argument(
        "namespace", metavar="NS", type=os.fsencode, nargs="?", help="its name in the store (default: the exported one)"
    )
    parser.add_argument("--replace", action="store_true", help="replace what is stored under that name")
    parser.add_argument("--raw", action="store_true", help="FILE is an entry file; needs --dir")
    parser.add_argument("--vquant", metavar="FORMAT", help="store it in this format; native keeps every word")
    parser.add_argument("--model", metavar="PATH", type=Path, help="directory of the model, for the digest")
    parser.add_argument(
        "--tokens", metavar="PATH", type=Path, help="the ids of the prefix, a JSON list, for the digest"
    )
    parser.add_argument("--digest", metavar="HEX", help="the digest to store it with")
    parser.add_argument("--no-digest", action="store_true", help="store it without one: by namespace only")
    parser.add_argument("--rope", type=float, metavar="THETA", help="base of the rotary embedding of the keys")
    places.add_options(parser)
    return _main(parser, argv, _import)


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"pion {name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _main(parser: argparse.ArgumentParser, argv: Sequence[str], run: _Run) -> int:
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:  # argparse has said why, or printed the help
        return int(end.code or 0)
    try:
        run(args)
    except (PionError, ValueError, OSError, ImportError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


# --- export ----------------------------------------------------------------------------------------------------------


def _export(args: argparse.Namespace) -> None:
    if args.raw:
        _export_raw(args)
        return
    from pion.client import cache_files, portable
    from pion.client.errors import PrefixMissError

    if args.file.suffix != cache_files.SUFFIX:
        raise ValueError(
            f"{args.file}: mlx-lm loads a prompt cache from a name that ends with {cache_files.SUFFIX} (--raw copies "
            "the entry file, under any name)"
        )
    place = places.place_of(args)
    ns = args.namespace
    try:
        before = place.info(ns)
        about = portable.describe(place.why(ns), before, args.heads, place.manifest(ns))
        layers, decoded = portable.export_layers(about, lambda side, layer: place.answer(ns, side, layer, about.rows))
        if place.info(ns) != before:
            raise CommandError("ERR the prefix was replaced while it was read")
    except (PrefixMissError, CommandError, cache_files.CacheFileError) as error:
        raise PionError(f"{ns.decode('utf-8', 'backslashreplace')}: {error}") from error
    finally:
        place.close()
    metadata = portable.labels(ns, about, layers, decoded, __version__)
    if args.model:
        metadata |= {"model": args.model, "tokenizer_config": '{"trust_remote_code": null}'}
    with new_file(args.file, replace=args.replace) as temporary:
        cache_files.save(temporary, layers, about.rows, metadata)
    print(f"{args.file}: {len(layers)} layers of {about.rows} tokens, {_exported(metadata, layers)}")


def _exported(metadata: dict[str, str], layers: list[Any]) -> str:
    from pion.client.cache_files import Quantized

    count = sum(isinstance(layer, Quantized) for layer in layers)
    if count == len(layers):
        return "as a QuantizedKVCache of 4 bits in groups of 32"
    some = f", {count} layers as a QuantizedKVCache" if count else ""
    k, _, v = metadata["pion_formats"].partition("+")
    stored = k if k == v else f"K {k}, V {v}"
    if decoded := metadata.get("pion_decoded_to"):
        return f"stored as {stored}, decoded to {decoded}{some}"
    return f"word for word ({stored}){some}"


def _export_raw(args: argparse.Namespace) -> None:
    from pion.store import portable

    if args.dir is None:
        raise ValueError("--raw copies a file of a data directory: say which with --dir")
    if args.heads or args.model:
        raise ValueError("--raw copies the entry as it is: --heads and --model have no place there")
    with new_file(args.file, replace=args.replace) as temporary:
        found = portable.export_entry(args.dir, args.namespace, temporary)
    print(f"{args.file}: {found}")


# --- import ----------------------------------------------------------------------------------------------------------


def _import(args: argparse.Namespace) -> None:
    if args.raw:
        _import_raw(args)
        return
    from pion.client import cache_files, portable

    if _is_entry_file(args.file):
        raise ValueError(
            f"{args.file} is an entry file of a Pion store, as pion export --raw copies it: "
            "import it with --raw --dir DIR"
        )
    file = cache_files.load(args.file)
    said = portable.read_labels(file)
    arrays = portable.import_arrays(file)
    ns = args.namespace if args.namespace is not None else said.namespace
    if ns is None:
        raise ValueError(f"{args.file} names no namespace: say under which to store it")
    digest, rope = _identity(args, said, arrays)
    formats = _formats(args.vquant, said)
    place = places.place_of(args, make=True)
    try:
        place.store(ns, arrays, formats, {"digest": digest, "rope": rope, "replace": args.replace})
        if not (why := place.why(ns)).startswith("hit"):
            raise CommandError(f"ERR the prefix is not there as a whole: {why}")
        kept = _committed(place)
    finally:
        place.close()
    name = ns.decode("utf-8", "backslashreplace")
    print(f"{name}: {len(arrays.k)} layers of {file.rows} tokens{_imported(formats, arrays)}")
    if not kept:
        print("the server keeps nothing over its end")
    if digest is None:
        print("without a digest: found by its namespace, not by PionPromptCache.get_or_prefill")


def _is_entry_file(path: Path) -> bool:
    """Whether a file begins as entry files do. OSError: it cannot be read."""
    with path.open("rb") as file:
        try:
            return bool(framing.read_file_header(file.fileno(), type=layout.ENTRY_TYPE))
        except framing.FramingError as error:
            return error.reason == "version"


def _committed(place: places.Place) -> bool:
    """Make the prefix durable; False where the server makes nothing durable."""
    try:
        place.commit()
    except CommandError as error:
        if "writes are not logged" not in str(error):
            raise
        return False
    return True


def _formats(asked: str | None, said: Any) -> tuple[str, str]:
    """The formats to store K and V in: what is asked for, else what the file was exported from, if that is one each."""
    if asked is not None:
        return asked, asked
    if said.formats is None or any("/" in fmt or fmt not in BUILT_FORMATS for fmt in said.formats):
        return "native", "native"
    k, v = said.formats
    return k, v


def _imported(formats: tuple[str, str], arrays: Any) -> str:
    from pion.client.formats import stored_format

    k, v = (stored_format(name, arrays.dtype) for name in formats)
    text = f", stored as {k}" if k == v else f", stored as K {k}, V {v}"
    return f"{text}, {arrays.decoded} layers from their quantized values" if arrays.decoded else text


def _identity(args: argparse.Namespace, said: Any, arrays: Any) -> tuple[str | None, float | None]:
    """Digest and rope to register with.

    Raises:
        ValueError: options that exclude each other, or that contradict the file.
    """
    rope = args.rope if args.rope is not None else said.rope
    if args.no_digest and (args.digest or args.model or args.tokens):
        raise ValueError("--no-digest excludes --digest, --model and --tokens")
    if (args.model is None) != (args.tokens is None):
        raise ValueError("--model and --tokens make the digest together")
    if args.no_digest:
        return None, rope
    digest: str | None = args.digest.lower() if args.digest else None
    if args.model is not None:
        digest, theta = _computed(args, arrays)
        rope = theta if rope is None else rope
    if digest is not None:
        if said.digest is not None and said.digest != digest:
            raise ValueError(f"{args.file} belongs to other tokens or another model: its digest is {said.digest}")
        return digest, rope
    if said.changed:
        raise ValueError(
            f"{args.file} holds other arrays than Pion exported, so its digest does not hold: "
            "say what they are with --model and --tokens, or --digest, or --no-digest"
        )
    return said.digest, rope


def _computed(args: argparse.Namespace, arrays: Any) -> tuple[str, float | None]:
    """The digest of the model and the tokens that are given, and the model's rope."""
    from pion.client.caches import inspect_model, mlx_modules
    from pion.client.identity import model_identity, prefix_digest

    try:
        ids = json.loads(args.tokens.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{args.tokens} is no JSON list of token ids: {error}") from error
    mlx_modules()
    from mlx_lm.utils import load_model

    found = load_model(args.model)
    model = found[0] if isinstance(found, tuple) else found  # with its configuration, since mlx-lm 0.22
    layout = inspect_model(model)
    heads, rows, head_dim = arrays.k[0].shape
    if len(ids) != rows:
        raise ValueError(f"{args.file} holds {rows} tokens, {args.tokens} {len(ids)}")
    here, there = (len(arrays.k), heads, head_dim), (layout.cache_len, layout.n_kv_heads, layout.head_dim)
    if here != there:
        raise ValueError(f"{args.file} holds {here} layers, heads, values of a head; the model has {there}")
    return prefix_digest(model_identity(model), ids), layout.rope


def _import_raw(args: argparse.Namespace) -> None:
    from pion.store import portable

    if args.dir is None:
        raise ValueError("--raw puts a file into a data directory that no server holds: say which with --dir")
    if args.namespace is not None:
        raise ValueError("--raw keeps the namespace that stands in the file: give none")
    for name in ("model", "tokens", "digest", "rope", "no_digest"):
        if getattr(args, name):
            raise ValueError(f"--raw keeps what stands in the file: --{name.replace('_', '-')} has no place there")
    found = portable.import_entry(args.dir, args.file, replace=args.replace)
    print(f"{args.dir}: {found}")
