"""A connection that can't be made: whether a parameter is wrong for every server, and what the hint names."""

import pytest

from cdcpipe.errors import ConnectionParameterError, UnreachableError
from cdcpipe.libpq.connection_hints import connection_hint
from cdcpipe.replication.session import connect, initialising

NOBODY = {"host": "127.0.0.1", "port": "1", "dbname": "d", "user": "u"}

REFUSED = [
    ({"sslmode": "Mars"}, "correct sslmode, which -m or -d gives"),
    ({"port": "Mars"}, "correct -p, or port in -d or -m"),
    ({"port": "99999"}, "correct -p, or port in -d or -m"),
    ({"port": "1,2"}, "correct -h, or host in -d or -m"),
    ({"service": "Mars"}, "correct service, which -m or -d gives"),
    ({"connect_timeout": "Mars"}, "correct connect_timeout, which -m or -d gives"),
    ({"keepalives_idle": "Mars"}, "correct keepalives_idle, which -m or -d gives"),
    ({"target_session_attrs": "Mars"}, "correct target_session_attrs, which -m or -d gives"),
    ({"ssl_min_protocol_version": "Mars"}, "correct ssl_min_protocol_version, which -m or -d gives"),
    (
        {"ssl_min_protocol_version": "TLSv1.3", "ssl_max_protocol_version": "TLSv1.2"},
        "correct ssl_min_protocol_version, which -m or -d gives",
    ),
]


@pytest.mark.parametrize(("wrong", "hint"), REFUSED)
def test_a_value_that_libpq_refuses_is_a_wrong_argument(wrong: dict[str, str], hint: str) -> None:
    """Nobody should try again, also where other wrong arguments are errors of the server."""
    with pytest.raises(ConnectionParameterError) as caught, initialising():
        connect(NOBODY | wrong)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("FATAL:  unsupported startup parameter: replication", "this is a connection pooler: name the host and port of the server"),
        ("FATAL:  Tenant or user not found", "this is a connection pooler"),
        ("FATAL:  (ENOTFOUND) tenant/user postgres.abc not found", "this is a connection pooler"),
        ("FATAL:  unsupported startup parameter in options: cdcpipe.session", "this is a connection pooler"),
        ("connection failed: Network is unreachable\n\tIs the server running on that host?", "no route to that address"),
    ],
)
def test_a_pooler_and_a_missing_route_are_named(message: str, hint: str) -> None:
    assert hint in connection_hint(message, {})


def test_a_value_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSSLMODE", "Mars")
    with pytest.raises(ConnectionParameterError, match="invalid sslmode value") as caught:
        connect(NOBODY)
    assert caught.value.hint == "correct the environment variable PGSSLMODE"


@pytest.mark.parametrize(
    "said",
    ["server is not in hot standby mode", "server is in hot standby mode", "session is read-only", "session is not read-only"],
)
def test_a_server_of_another_kind_than_asked_for_is_no_wrong_host(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("PGTARGETSESSIONATTRS", "standby")
    message = f'connection to server at "db1" (10.0.0.1), port 5432 failed: {said}'
    hint = connection_hint(message, {})
    assert "no server that answers is of the kind that target_session_attrs asks for" in hint
    assert hint.endswith("correct the environment variable PGTARGETSESSIONATTRS")


def test_a_server_that_does_not_listen_is_no_wrong_argument() -> None:
    with pytest.raises(UnreachableError, match=f"^{UnreachableError.BEGINNING}"):
        connect(NOBODY)


REFUSALS = [
    ('password authentication failed for user "u"', "check the password"),
    ('password authentication failed for user "u"', "VALID UNTIL"),
    ('too many connections for role "u"', "ALTER ROLE name CONNECTION LIMIT"),
    ('too many connections for database "d"', "ALTER DATABASE name CONNECTION LIMIT"),
    ("sorry, too many clients already", "max_connections"),
    ("remaining connection slots are reserved for roles with the SUPERUSER attribute", "max_connections"),
    ("remaining connection slots are reserved for non-replication superuser connections", "max_connections"),
    ('number of requested standby connections exceeds "max_wal_senders" (currently 2)', "max_wal_senders"),
    ('role "u" is not permitted to log in', "ALTER ROLE name LOGIN"),
    ('database "d" is not currently accepting connections', "ALLOW_CONNECTIONS true"),
    ('permission denied for database "d"; DETAIL:  User does not have CONNECT privilege.', "GRANT CONNECT"),
    ('cannot connect to invalid database "d"; HINT:  Use DROP DATABASE to drop invalid databases.', "database's name"),
    ('database "d" does not exist', "database's name"),
    ('role "u" does not exist', "user's name"),
    ("permission denied to start WAL sender", "ALTER ROLE name REPLICATION"),
    ('no pg_hba.conf entry for host "[local]", user "u", database "d", no encryption', "pg_hba.conf"),
    ("the database system is starting up", "starting up"),
    ('Peer authentication failed for user "u"', "pg_ident.conf"),
    ('Ident authentication failed for user "u"', "pg_ident.conf"),
    ('LDAP authentication failed for user "u"', "the method that pg_hba.conf asks for"),
    ('GSSAPI authentication failed for user "u"', "kinit"),
    ("connection requires a valid client certificate", "sslcert"),
    ('certificate authentication failed for user "u"', "sslcert"),
    ('could not access file "nolib": No such file or directory', "session_preload_libraries"),
    ('could not access file "$libdir/plugins/nolib": No such file or directory', "local_preload_libraries"),
    ('could not load library "/lib/x.so": /lib/x.so: undefined symbol: y', "session_preload_libraries"),
    ('incompatible library "/lib/x.so": version mismatch', "session_preload_libraries"),
]


@pytest.mark.parametrize(("refusal", "hint"), REFUSALS)
def test_a_session_that_the_server_refuses_has_a_hint_of_its_own(refusal: str, hint: str) -> None:
    """The messages are those of PostgreSQL 14 to 18."""
    assert hint in connection_hint(f'connection to server at "127.0.0.1", port 5432 failed: FATAL:  {refusal}', NOBODY)


OF_LIBPQ = [
    ("SSL error: certificate verify failed", "correct sslrootcert, which -m or -d gives"),
    (
        'server certificate for "db1" does not match host name "127.0.0.1"',
        "as the server's certificate does (-h)",
    ),
    ("SSL error: tlsv1 alert unknown ca", "correct sslcert"),
    ("SSL error: ssl/tls alert certificate expired", "correct sslcert"),
    ('certificate present, but not private key file "no.key"', "correct sslkey"),
    ('private key file "k" has group or world access; file must have permissions u=rw (0600) or less', "correct sslkey"),
    ('could not load private key file "ca.key": key values mismatch', "correct sslkey"),
    ("channel binding required, but server authenticated client without channel binding", "correct channel_binding"),
    ("server accepted connection without a valid SSL certificate", "correct sslcertmode"),
    ('requirepeer specifies "x", but actual peer user name is "postgres"', "correct requirepeer"),
    ("GSSAPI encryption required but no credential cache", "correct gssencmode"),
    ("GSSAPI continuation error: No credentials were supplied: No Kerberos credentials available", "kinit"),
    ("fe_sendauth: no password supplied", "PGPASSWORD"),
]


@pytest.mark.parametrize(("message", "hint"), OF_LIBPQ)
def test_a_server_that_libpq_refuses_has_a_hint_of_its_own(message: str, hint: str) -> None:
    """The server is up, and host, port and database are right."""
    settings = NOBODY | {"sslrootcert": "ca.crt"}
    found = connection_hint(f'connection to server at "127.0.0.1", port 5432 failed: {message}', settings)
    assert hint in found
    assert "that the server is up" not in found


def test_a_user_id_without_a_name_is_told_to_name_the_user() -> None:
    """libpq takes the name of the system's user where none is given, such as in a container with any user id."""
    assert "-U, PGUSER" in connection_hint("local user with ID 12345 does not exist", {})
