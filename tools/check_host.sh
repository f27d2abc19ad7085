#!/bin/sh
# Prints the Python that the environment is made with, or says what this machine lacks and how to get it.
# Called by the Makefile; PYTHON names another interpreter.
set -u

fail() {
    printf 'pion: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '      %s\n' "$line" >&2; done
    exit 1
}

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

found=""
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
    if recent "$candidate"; then
        found=$(command -v "$candidate")
        break
    fi
done
if [ -z "$found" ]; then
    if [ -n "${PYTHON:-}" ]; then
        fail "PYTHON=$PYTHON is not a Python of version 3.11 or later"
    fi
    fail "Python 3.11 or later is needed; python3 here is $(python3 --version 2>&1 || true)" \
        "Debian, Ubuntu: apt-get install python3 python3-dev python3-venv" "macOS: brew install python@3.12"
fi

"$found" -c 'import venv, ensurepip' >/dev/null 2>&1 || fail "$found cannot make virtual environments" \
    "Debian, Ubuntu: apt-get install python3-venv"

header=$("$found" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[ -f "$header" ] || fail "the headers of $found are missing ($header)" "Debian, Ubuntu: apt-get install python3-dev"

compiler=${CC:-cc}
command -v "${compiler%% *}" >/dev/null 2>&1 || fail "no C compiler: $compiler is not on PATH" \
    "Debian, Ubuntu: apt-get install gcc libc6-dev" "macOS: xcode-select --install"
work=$(mktemp -d) || fail "no temporary folder can be made"
trap 'rm -rf "$work"' EXIT
printf '#include <stdio.h>\nint main(void) { return puts("ok") < 0; }\n' >"$work/probe.c"
$compiler "$work/probe.c" -o "$work/probe" >"$work/log" 2>&1 || fail "$compiler cannot build a program:" \
    "$(head -n 3 "$work/log")" "Debian, Ubuntu: apt-get install gcc libc6-dev"

printf '%s\n' "$found"
