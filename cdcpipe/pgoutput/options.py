"""pgoutput's options: their values, the first server version with each, and the lowest protocol version for each.

Source: the manual, "Logical Streaming Replication Protocol", Logical Streaming Replication Parameters. An old server's error for a
newer option says at best that it does not know the option (XX000). So the options are checked here, before the stream starts.
"""

from __future__ import annotations

from collections.abc import Mapping

from cdcpipe.errors import InitError

__all__ = ["NAMES", "as_bool", "complete", "setting"]

_BOOLEANS = {"true": "on", "false": "off"}
"""pgoutput reads its options with ``defGetBoolean``, which takes only these two, ``on`` and ``off``."""

_OPTIONS = {
    "binary": {"off": (0, 1), "on": (140000, 1)},
    "messages": {"off": (0, 1), "on": (140000, 1)},
    "streaming": {"off": (0, 1), "on": (140000, 2), "parallel": (160000, 4)},
    "two_phase": {"off": (0, 1), "on": (150000, 3)},
    "origin": {"any": (160000, 1), "none": (160000, 1)},
}
"""For each option: value → (the first server version with it, the lowest protocol version for it)."""

NAMES = frozenset({"proto_version", "publication_names", *_OPTIONS})
"""The options that pgoutput knows. With a client-side output plugin, all other options belong to that plugin."""

_UNKNOWN_SINCE = 190000
"""The first server version whose options this program does not know."""

_LAST_VERSION = ((160000, 4), (150000, 3), (140000, 2), (0, 1))
"""Server version → the last protocol version that it speaks."""


def complete(options: Mapping[str, str | None], server_version: int) -> dict[str, str | None]:
    """Check ``options`` against the server, and add the lowest possible ``proto_version`` if there is none.

    Raises InitError if an option is unknown, too new, has a wrong value, or contradicts ``proto_version``. A server that is newer
    than this program may know more options, and checks the unknown ones itself.
    """
    unknown = sorted(set(options) - NAMES)
    if unknown and server_version < _UNKNOWN_SINCE:
        raise InitError(
            f"pgoutput has no option {', '.join(map(repr, unknown))}",
            hint=f"its options are {', '.join(sorted(NAMES))}; with --output or -J, -o also takes those of the output plugin",
        )
    if "publication_names" in options and not options["publication_names"]:
        raise InitError("pgoutput's option publication_names has no value", hint="name the publications: --publication NAME")
    needed = 1
    for name, values in _OPTIONS.items():
        if name not in options:
            continue
        written = "on" if (text := options[name]) is None else text.lower()
        value = _BOOLEANS.get(written, written)
        if value not in values:
            msg = f"pgoutput's option {name} takes {', '.join(values)}, not {text!r}"
            raise InitError(msg)
        since, protocol = values[value]
        if server_version < since:
            msg = f"pgoutput has {name}={value} from PostgreSQL {since // 10000} on; this server is {server_version // 10000}"
            raise InitError(msg, hint=f"leave out --{name.replace('_', '-')} (or -o {name})")
        needed = max(needed, protocol)
    last = next(protocol for version, protocol in _LAST_VERSION if server_version >= version)
    given = options.get("proto_version")
    if given is None:
        return {"proto_version": str(needed), **{name: value for name, value in options.items() if name != "proto_version"}}
    if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= last:
        msg = f"proto_version {given} is not possible: PostgreSQL {server_version // 10000} speaks 1 to {last}"
        raise InitError(msg)
    if int(given) < needed:
        msg = f"proto_version {given} is too low for the other options: they need {needed}"
        raise InitError(msg, hint="leave out --proto-version (or -o proto_version): cdcpipe chooses the lowest possible version")
    return dict(options)


def setting(options: Mapping[str, str | None], name: str) -> str:
    """Return the value of an option as the server's plugins read it: booleans as ``on`` and ``off``, no option as ``off``."""
    found = as_bool(options[name]) if name in options else False
    return (options[name] or "").lower() if found is None else "on" if found else "off"


def as_bool(value: str | None) -> bool | None:
    """Read a boolean as the server's ``parse_bool`` does: an unambiguous beginning of true, false, yes, no, on, off; 1 or 0.

    No value means True. For any other text it returns None. wal2json and test_decoding read their options so.
    """
    text = "on" if value is None else value.lower()
    if text in ("1", "on") or (text and ("true".startswith(text) or "yes".startswith(text))):
        return True
    return False if text in ("0", "of", "off") or (text and ("false".startswith(text) or "no".startswith(text))) else None
