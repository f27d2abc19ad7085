"""Writes docs/commands.md from the command table.

python tools/list_commands.py            writes the page
python tools/list_commands.py --check    exit code 1 when the page is not what the table says
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "commands.md"

HEAD = """\
# Commands

Made from the server's command table by `tools/list_commands.py`; `COMMAND DOCS` tells the same, and `redis-cli` makes
its hints of that. Lower case names an argument, `[...]` is optional, `|` separates alternatives, and `...` repeats what
stands before it. Whatever is not listed answers `ERR unknown command`. Prefixes, rows and recurrent state need
`--kvcache`, attention needs that or `--attention`.

`FLUSHALL` and `FLUSHDB` empty databases of the ordinary keyspace. Prefixes are in none and stay: `KV.PREFIX.FLUSH`
drops them all, `KV.PREFIX.DROP` single ones.
"""
TITLES = {
    "prefix": "Prefixes", "vstore": "Rows", "state": "Recurrent state", "attention": "Attention", "pion": "Figures",
    "string": "Strings",
    "hash": "Hashes", "sorted-set": "Sorted sets", "generic": "Keys", "connection": "Connections", "server": "Server",
    "cluster": "Cluster",
}  # fmt: skip


def page() -> str:
    """The page as it should be."""
    sys.path.insert(0, str(ROOT))
    import pion.commands  # noqa: F401  its modules fill the table
    from pion.commands import table, usage

    usages = usage.lines()
    groups: dict[str, list[table.Command]] = {}
    for record in table.walk():
        if not record.subcommands:
            groups.setdefault(record.group, []).append(record)
    order = [*(group for group in TITLES if group in groups), *sorted(groups.keys() - TITLES.keys())]
    out = [HEAD]
    for group in order:
        out.append(f"\n## {TITLES.get(group, group)}\n\n| command | |\n|---|---|\n")
        for record in sorted(groups[group], key=lambda record: record.name):
            text = f"{record.name.upper().replace('|', ' ')} {usages.get(record.name, '')}".strip()
            usage_cell = text.replace("|", "\\|")
            out.append(f"| `{usage_cell}` | {record.summary.replace('|', chr(92) + '|')} |\n")
    return "".join(out)


def main(argv: list[str]) -> int:
    """The command."""
    made = page()
    if argv[1:] == ["--check"]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == made:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is out of date: run python tools/list_commands.py")
        return 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
