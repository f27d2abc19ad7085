"""`pion check DIR`: is everything in a data directory what was written there?"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pion._core import framing
from pion.limits import LANE_SOCKET
from pion.store import index, layout
from pion.store.files import EXPORT, LOCK, QUARANTINE, TRASH
from pion.store.regular import open_regular
from pion.tools import entryfile, keyspacefiles
from pion.tools.entryfile import EntryFile
from pion.tools.findings import WHY, Finding, Progress

CLEAN, PROBLEMS, FAILED = 0, 1, 2  # exit codes
THREADS: Final = 4  # files that are read at once: a disk has more than one request to do
_UNFINISHED: Final = (layout.SUFFIX + ".new", layout.SUFFIX + ".compact")


class CannotCheckError(Exception):
    """The directory cannot be checked; the text says why."""


@dataclass(slots=True)
class Report:
    """What was read, and what is wrong."""

    entries: int = 0
    records: int = 0
    nbytes: int = 0
    keys: int = 0
    keyspace_records: int = 0
    findings: list[Finding] = field(default_factory=list)
    tell: Callable[[Finding], object] = lambda _: None

    def found(self, path: str, offset: int | None, text: str, *, problem: bool = True) -> None:
        """Note something."""
        self.add(Finding(path, offset, text, problem))

    def add(self, finding: Finding) -> None:
        """The same."""
        self.findings.append(finding)
        self.tell(finding)

    @property
    def problems(self) -> int:
        """How many findings are damage."""
        return sum(item.problem for item in self.findings)


def hold(root: Path) -> int:
    """Keep servers away while their files are read; returns a descriptor, -1 where no server has ever been.

    Raises:
        CannotCheckError: a server has the directory open.
    """
    try:
        fd = open_regular(root / LOCK)
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise CannotCheckError(f"{root / LOCK}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            raise CannotCheckError(f"{root / LOCK}: {error.strerror}") from error
        raise CannotCheckError(
            f"{root} is in use by the process {pid or 'unknown'}: a running server writes its files. "
            "Stop it, or check a copy that KV.PREFIX.SAVE <name> makes"
        ) from None
    return fd


def check(root: Path, *, tell: Callable[[Finding], object] = lambda _: None, progress: bool | None = False) -> Report:
    """Verify a data directory; nothing in it is changed.

    Args:
        tell: called with each finding at once.
        progress: a line on stderr; None = when that is a terminal.

    Raises:
        CannotCheckError: it is no data directory, a server holds it, or it cannot be read.
    """
    if not root.is_dir():
        raise CannotCheckError(f"{root}: {'not a directory' if root.exists() else 'no such directory'}")
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise CannotCheckError(f"{root}: {error.strerror}") from error
    if not ({LOCK, index.NAME, "kv"} & set(names) or any(name.startswith("pion.wal.") for name in names)):
        raise CannotCheckError(f"{root} is no data directory of Pion: it has neither {index.NAME} nor kv/")
    lock = hold(root)
    try:
        return _Check(root, names, Report(tell=tell), progress).run()
    except OSError as error:
        raise CannotCheckError(f"{error.filename or root}: {error.strerror}") from error
    finally:
        if lock >= 0:
            os.close(lock)


class _Check:
    def __init__(self, root: Path, names: list[str], report: Report, shown: bool | None) -> None:
        self.root = root
        self.names = names
        self.report = report
        self.known: dict[bytes, index.Figures] = {}
        self.dropped: dict[bytes, int] = {}
        self.trusted = False
        self.files = list(self._entry_files())
        total = sum(size for _, size in self.files) + keyspacefiles.nbytes(root)
        self.progress = Progress(total, shown=shown)
        tell = report.tell

        def aloud(finding: Finding) -> None:
            self.progress.clear()
            tell(finding)

        report.tell = aloud

    def run(self) -> Report:
        self._index()
        self._entries()
        keyspace = keyspacefiles.verify(self.root, self.progress.add)
        for item in keyspace.findings:
            self.report.add(item)
        self.report.keys, self.report.keyspace_records = keyspace.keys, keyspace.records
        self._others()
        self.progress.clear()
        self.report.nbytes = self.progress.done
        return self.report

    # --- index ------------------------------------------------------------------------------------------------------

    def _index(self) -> None:
        report = self.report
        try:
            fd = open_regular(self.root / index.NAME)
        except FileNotFoundError:
            report.found(index.NAME, None, "is missing; the next start makes it from the entries", problem=False)
            return
        except OSError as error:
            report.found(index.NAME, None, f"cannot be read: {error.strerror}")
            return
        with open(fd, "rb") as file:
            data = file.read()
        try:
            header = index.read_header(data)
        except framing.FramingError as error:
            report.found(index.NAME, 0, f"the first record: {WHY.get(error.reason, error.reason)}")
            return
        said = index.Loaded()
        end = index.replay(data, header, said)
        self.known, self.dropped = said.entries, said.dropped
        self.trusted = end == len(data) or said.reason == "short"
        if end < len(data):
            if said.reason == "short":
                text = f"{len(data) - end} bytes of a write that was interrupted; the next start cuts them off"
            else:
                text = f"{WHY.get(said.reason, said.reason)}: {len(data) - end} bytes; the next start reads every entry"
            report.found(index.NAME, end, text, problem=said.reason != "short")

    # --- entries ----------------------------------------------------------------------------------------------------

    def _entry_files(self) -> Iterator[tuple[str, int]]:
        """(path relative to the directory, bytes) of whatever stands below kv/<tenant>."""
        for folder, folders, names in os.walk(self.root / "kv" / layout.TENANT):
            folders.sort()
            for name in sorted(names + [n for n in folders if n.endswith(layout.SUFFIX)]):
                path = os.path.relpath(os.path.join(folder, name), self.root)
                yield path, os.lstat(self.root / path).st_size

    def _entries(self) -> None:
        seen: set[bytes] = set()
        wanted: list[str] = []
        for path, _ in self.files:
            if path.endswith(_UNFINISHED):
                self.report.found(path, None, "an unfinished file; the next start removes it", problem=False)
            elif not layout.is_entry_path(path):
                self.report.found(path, None, "no entry of Pion: left alone", problem=False)
            else:
                wanted.append(path)
        with ThreadPoolExecutor(THREADS) as pool:
            # not all at once: what was read of a file is kept until it is its turn
            waiting = deque(pool.submit(self._read, path) for path in wanted[: 2 * THREADS])
            for at, path in enumerate(wanted):
                if at + 2 * THREADS < len(wanted):
                    waiting.append(pool.submit(self._read, wanted[at + 2 * THREADS]))
                self._entry(path, waiting.popleft().result(), seen)
        for key in sorted(self.known.keys() - seen):
            self.report.found(layout.entry_path(key), None, f"is missing: the index has it as {_name(key)}")

    def _read(self, path: str) -> EntryFile | OSError:
        try:
            return entryfile.read(self.root / path, path, progress=self.progress.add)
        except OSError as error:
            return error

    def _entry(self, path: str, entry: EntryFile | OSError, seen: set[bytes]) -> None:
        report = self.report
        if isinstance(entry, OSError):
            report.found(path, None, f"cannot be read: {entry.strerror}")
            seen.update(key for key in self.known if layout.entry_path(key) == path)
            return
        report.entries += 1
        report.records += len(entry.records)
        self._writable(path)
        for item in entry.findings:
            report.add(item)
        if entry.header is None or layout.entry_path(entry.key) != path:
            if entry.header is not None:
                text = f"holds {_name(entry.key)}, whose place is {layout.entry_path(entry.key)}"
                report.found(path, 0, text)
            seen.update(key for key in self.known if layout.entry_path(key) == path)
            return
        seen.add(entry.key)
        self._compare(path, entry, entry.header.generation)

    def _writable(self, path: str) -> None:
        if not os.access(self.root / path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
            text = "may not be written by this user: a server that runs as this user moves it aside"
            self.report.found(path, None, text, problem=False)

    def _compare(self, path: str, entry: EntryFile, generation: int) -> None:
        """An entry with what the index says of it."""
        report, figures = self.report, self.known.get(entry.key)
        if figures is None:
            if self.dropped.get(entry.key) == generation:
                report.found(path, None, "was dropped; the next start removes it", problem=False)
            elif self.trusted:
                report.found(path, None, "the index does not know it; the next start takes it in", problem=False)
            return
        if figures.generation != generation or entry.damaged:
            return
        if framing.align_up(entry.end) < figures.synced:
            text = f"its records end here: those up to {figures.synced}, which had been flushed, are missing"
            report.found(path, entry.end, text)
            return
        if not figures.flags & index.CLEAN:
            return
        rows = sum(entry.total(number)[0] for number in (layout.KEYS, layout.VALUES))
        if framing.align_up(entry.end) != figures.size:
            report.found(path, entry.end, f"its records end here, the index says at {figures.size}")
        elif rows != figures.rows:
            report.found(path, None, f"it holds {rows} rows, the index says {figures.rows}")

    # --- everything else --------------------------------------------------------------------------------------------

    def _others(self) -> None:
        found = self.report.found
        for name in self.names:
            path = self.root / name
            if ".cut." in name or ".unused" in name:
                found(name, None, "set aside by an earlier start", problem=False)
            elif name in (LOCK, index.NAME, "kv", "blob", EXPORT) or name.startswith(("pion.wal.", "pion.snapshot.")):
                if name == index.NAME or name.startswith("pion.wal."):
                    self._writable(name)
                if name.endswith(".tmp"):
                    found(name, None, "an unfinished snapshot; the next start removes it", problem=False)
                elif name in ("kv", "blob", EXPORT) and not path.is_dir():
                    found(name, None, "is no directory")
            elif name == LANE_SOCKET and path.is_socket():
                continue  # of a server that was killed; the next one makes it anew
            elif name == QUARANTINE and path.is_dir():
                kept = len(os.listdir(path))
                if kept:
                    found(name, None, f"{kept} files set aside by earlier starts", problem=False)
            elif name == f"{Path(index.NAME).stem}.new":
                found(name, None, "an unfinished index; the next one replaces it", problem=False)
            else:
                found(name, None, "not of this data directory: left alone", problem=False)
        trash = self.root / TRASH
        if trash.is_dir() and (waiting := len(os.listdir(trash))):
            found(TRASH, None, f"{waiting} dropped entries on their way out", problem=False)


def _name(key: bytes) -> str:
    kind = "prefix" if key[:1] == layout.PREFIX else "session"
    return f"{kind} {key[1:].decode('utf-8', 'backslashreplace')!r}"


def summary(report: Report) -> str:
    """The last line."""
    problems = report.problems
    verdict = "clean" if not problems else f"{problems} problem{'s' if problems > 1 else ''}"
    return (
        f"{report.entries} entries with {report.records} records, {report.keys} keys from {report.keyspace_records} "
        f"records, {report.nbytes / 2**20:.1f} MiB: {verdict}"
    )


def main(argv: Sequence[str]) -> int:
    """The command.

    Returns:
        0: clean; 1: there are problems, each on a line of stdout; 2: nothing could be checked.
    """
    parser = argparse.ArgumentParser(
        prog="pion check",
        description="Compare every record of a data directory with its checksum, and the files with each other. "
        "Nothing is changed. No server may have the directory open.",
        epilog="exit code: 0 clean, 1 problems were found, 2 the directory could not be checked",
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="what --dir of the server says")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("-q", "--quiet", action="store_true", help="print problems only: no notes, no summary")
    args = parser.parse_args(argv)

    def tell(finding: Finding) -> None:
        if not args.json and (finding.problem or not args.quiet):
            print(finding, flush=True)

    try:
        report = check(args.dir, tell=tell, progress=False if args.quiet else None)
    except CannotCheckError as error:
        print(f"pion check: {error}", file=sys.stderr)
        return FAILED
    if args.json:
        print(json.dumps(_as_json(report), indent=2))
    elif not args.quiet:
        print(summary(report))
    return PROBLEMS if report.problems else CLEAN


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "clean": not report.problems,
        "entries": report.entries,
        "records": report.records,
        "bytes": report.nbytes,
        "keys": report.keys,
        "keyspace_records": report.keyspace_records,
        "findings": [item.as_json() for item in report.findings],
    }
