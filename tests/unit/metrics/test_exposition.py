"""Metrics over HTTP: what a scrape gets, where they listen, and when they end."""

import http.client
import io
import json
import logging
import re
import socket
import struct
import sys
import threading

import pytest
from ports import free_port

from cdcpipe import exposition, logs
from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.exposition import Address, parse_address, serving
from cdcpipe.measures import Histogram, Metric
from cdcpipe.pipe.exitcode import ExitCode
from support.blocked_imports import import_without
from support.logging_state import logging_as_before
from support.metrics import scrape, value
from support.waiting import until

GAUGE = Metric("cdcpipe_a_bytes", "gauge", 'Of "a" \\ and b.', ("table",))
COUNTER = Metric("cdcpipe_b", "counter", "Of b.")
TIMES = Metric("cdcpipe_c_seconds", "histogram", "Of c.")


def test_a_scrape_gets_the_values_of_its_moment() -> None:
    port, count, times = free_port(), [0], Histogram()

    def collect():
        count[0] += 1
        yield GAUGE.reading(1 << 40, 'public."x\\y\n"')
        yield GAUGE.reading(2, "public.b")
        yield COUNTER.reading(count[0])
        yield TIMES.reading(times)

    with serving(Address("127.0.0.1", port), collect):
        assert count == [0]
        first = scrape(port)
        times.add(0.02)
        times.add(1e6)
        second = scrape(port)
    assert value(first, "cdcpipe_a_bytes", table='public."x\\y\n"') == float(1 << 40)
    assert [value(each, "cdcpipe_b_total") for each in (first, second)] == [1, 2]
    assert first["cdcpipe_a_bytes"].unit == "bytes"
    assert first["cdcpipe_a_bytes"].documentation == GAUGE.help
    assert [value(first, f"cdcpipe_c_seconds_{end}") for end in ("count", "sum")] == [0, 0]
    assert [value(second, f"cdcpipe_c_seconds_{end}") for end in ("count", "sum")] == [2, 1e6 + 0.02]
    assert [value(second, "cdcpipe_c_seconds_bucket", le=le) for le in ("0.01", "0.025", "1800.0", "+Inf")] == [0, 1, 1, 2]
    assert value(second, "process_open_fds")
    assert value(second, "process_start_time_seconds")  # an alert needs it
    with pytest.raises(ConnectionError):
        scrape(port)
    assert "cdcpipe-metrics" not in {thread.name for thread in threading.enumerate()}


def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        with pytest.raises(CdcpipeError, match=rf"--metrics {address}: Address already in use") as raised, serving(address, list):
            pass
    assert raised.value.exit_code == ExitCode.SYSTEM_ERROR  # the port may be free soon, and the other address come later
    elsewhere = parse_address("203.0.113.1:9187")  # for documentation: no machine has it
    with pytest.raises(CdcpipeError, match=r"--metrics 203.0.113.1:9187: ") as raised, serving(elsewhere, list):
        pass
    assert raised.value.exit_code == ExitCode.SYSTEM_ERROR


def test_a_host_without_a_name_is_this_machine() -> None:
    port = free_port()
    with serving(parse_address(str(port)), lambda: [COUNTER.reading(1)]):
        assert scrape(port)
        with socket.create_server(("127.0.0.2", port)):  # no other address is taken
            pass


def test_nothing_listens_without_an_address() -> None:
    before = threading.active_count()
    with serving(None, list):
        assert threading.active_count() == before


def test_only_one_path_answers_to_get() -> None:
    port = free_port()
    with serving(Address("127.0.0.1", port), lambda: [COUNTER.reading(1)]):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/metrics", b"x")
        assert connection.getresponse().status == 405
        connection.close()


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def test_a_silent_client_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It would keep a thread and a descriptor for ever."""
    monkeypatch.setattr(exposition, "_SILENCE_S", 1.0)  # enough for the scrape, also on a busy machine
    port = free_port()
    with serving(Address("127.0.0.1", port), lambda: [COUNTER.reading(1)]), _connect(port) as silent, _connect(port) as stopped:
        stopped.sendall(b"GET /metr")
        assert (silent.recv(1), stopped.recv(1)) == (b"", b"")
        assert scrape(port)
    assert capsys.readouterr().err == ""


def _json_lines(stderr: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in stderr.splitlines()]


def test_a_lost_client_is_a_line_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    # What the server's thread writes while capsys.readouterr() runs can be lost.
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    with logging_as_before():
        logs.use("json")
        logs.to_stderr(logging.INFO, "%(message)s")
        with serving(Address("127.0.0.1", port), lambda: [COUNTER.reading(1)]):
            client = _connect(port)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets
            client.sendall(b"GET /metr")
            client.close()
            until(lambda: stderr.getvalue().count("\n") == 2, "the line of the lost client")
    said = _json_lines(stderr.getvalue())
    assert said[1]["message"] == "a scrape got no answer: ConnectionResetError: [Errno 104] Connection reset by peer"
    assert said[1]["level"] == "info"


def test_metrics_that_cannot_be_read_are_an_error_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no text of the exception, and comes once a minute. The scrape fails: no figure is left out in silence."""
    port = free_port()

    def collect():
        raise ValueError("a secret")

    with logging_as_before():
        logs.use("json")
        logs.to_stderr(logging.WARNING, "%(message)s")
        with serving(Address("127.0.0.1", port), collect):
            for _ in range(2):
                with pytest.raises(ConnectionError, match="500"):
                    scrape(port)
    said = _json_lines(capsys.readouterr().err)
    assert [each["level"] for each in said] == ["error"]
    assert re.fullmatch(r"the metrics can't be read: unexpected ValueError in line \d+ of \S+", said[0]["message"])


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9187", Address("127.0.0.1", 9187)),
        ("0.0.0.0:9187", Address("0.0.0.0", 9187)),
        ("[::1]:9187", Address("::1", 9187)),
        ("localhost:1", Address("localhost", 1)),
    ],
)
def test_an_address_is_parsed(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "x", "0", "65536", "-1", "a:b", ":9187", "1:", "²", "9187 "])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a port"):
        parse_address(text)


def test_the_programs_need_no_prometheus_without_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    done = import_without({"prometheus_client"}, "cli.invoke, spark_sink.commands.land, spark_sink.commands.run")
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InvalidArgumentsError, match="needs prometheus-client"), serving(Address("127.0.0.1", 1), list):
        pass
