"""DDL capture in a database of a test: runs SQL, and reads the messages that the capture wrote."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import postgres

from cdcpipe.ddl.message import PREFIX, parse
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Delete, Insert, LogicalMessage, Relation, Update
from support.cli_process import run_cli
from support.paths import ROOT

Message = dict[str, Any]


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads((ROOT / "cdcpipe/ddl/message.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


class Capture:
    """A database with the capture, a publication of all tables and a slot. `run` returns what the statements wrote."""

    def __init__(self, database: postgres.Database, *options: str) -> None:
        self.database = database
        self.connection = database.connect()
        self.connection.execute("create publication everything for all tables")
        self.slot = database.name
        self.connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [self.slot])
        self.install(*options)

    def install(self, *options: str) -> Message:
        """Install the capture with these options, and return the message that says so."""
        code, _, err = run_cli("ddl", "install", "-d", self.database.dsn, *options)
        assert (code, err) == (0, "")
        (message,) = self.read()
        assert message["kind"] == "installed"
        return message

    def empty(self) -> None:
        """Drop everything that a test has made."""
        self.connection.execute("reset all")
        for kind, names in (
            ("publication", "select quote_ident(pubname) from pg_publication where pubname <> 'everything'"),
            ("schema", "select quote_ident(nspname) from pg_namespace where nspname !~ '^(pg_|information_schema$|cdcpipe$)'"),
        ):
            for (name,) in self.connection.execute(names).fetchall():
                self.connection.execute(f"drop {kind} {name} cascade")
        self.connection.execute("create schema public")
        self.read()

    def run(self, *statements: str) -> list[Message]:
        """Run the statements, each as a query of its own, and return the messages that committed."""
        for statement in statements:
            self.connection.execute(statement)
        return self.read()

    def read(self) -> list[Message]:
        return [message for message in self.read_stream() if isinstance(message, dict)]

    def read_stream(self) -> list[Message | str]:
        """Return the messages, and between them a letter for each row that changed: I, U or D. R stands for a description."""
        found: list[Message | str] = []
        for (data,) in self.connection.execute(
            "select data from pg_logical_slot_get_binary_changes(%s, null, null,"
            " 'proto_version', '1', 'publication_names', 'everything', 'messages', 'true')",
            [self.slot],
        ):
            match decode(data, in_stream=False, streaming_parallel=None):
                case LogicalMessage(prefix=prefix, content=content) as message if prefix == PREFIX:
                    assert message.is_transactional
                    found.append(checked(prefix, content))
                case Insert() | Update() | Delete() | Relation():
                    found.append(chr(data[0]))
        return found

    def close(self) -> None:
        self.connection.close()


def checked(prefix: str, content: bytes) -> Message:
    """Return the message. It has to be as the schema says."""
    message = parse(prefix, content)
    assert message is not None, content
    validator().validate(message)
    return dict(message)


def table(message: Message, name: str) -> Message:
    """Return the description of the table of this name."""
    (found,) = [each for each in message["tables"] if each["name"] == name]
    return found


def columns(message: Message, name: str) -> list[str]:
    """Return a table's columns: ``number name type``, then ``!`` if it is NOT NULL, and ``=`` with its missing value."""
    return [
        f"{each['number']} {each['name']} {each['type']['text']}"
        + ("!" if each["not_null"] else "")
        + ("" if each["missing"] is None else f"={each['missing']}")
        for each in table(message, name)["columns"]
    ]


def summary(messages: Sequence[Message]) -> list[str]:
    """Return a line for each message: its kind, its tag, and the names of its tables."""
    lines = []
    for message in messages:
        names = [each["name"] for each in message.get("tables", [])]
        lines.append(" ".join([message["kind"], message.get("tag", ""), *names]).strip())
    return lines
