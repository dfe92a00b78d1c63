"""The program of the fake streamer: python fake_streamer_program.py DIRECTORY (prepare | options). See fake_streamer.py.

Tests start it hundreds of times, so it imports little, and no installed package (python -S).
"""

import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.staging import account
from spark_sink.staging.log import log_end
from support.pgoutput_stream import Transaction, encode_stream


def note(path: Path, text: str) -> None:
    with open(path, "a") as stream:
        stream.write(text + "\n")


def fail(turn: dict) -> None:
    if "stderr" in turn:
        sys.stderr.write(turn["stderr"])
        sys.stderr.flush()
    if "signal" in turn:
        os.kill(os.getpid(), turn["signal"])
        time.sleep(60)
    if "exit" in turn:
        os._exit(turn["exit"])


def main() -> None:
    directory, arguments = Path(sys.argv[1]), sys.argv[2:]
    is_look = "prepare" in arguments and (directory / "streamed").exists()
    starts, turns_path = (
        (directory / "looks", directory / "looks.json") if is_look else (directory / "starts", directory / "turns.json")
    )
    number = len(starts.read_text().splitlines()) if starts.exists() else 0
    note(starts, json.dumps(arguments))
    note(directory / "temporary", os.environ.get("TMPDIR", ""))
    turns = json.loads(turns_path.read_text()) if turns_path.exists() else []
    turn = turns[number] if number < len(turns) else {}
    transactions = [
        Transaction(end_lsn, tuple((relation_id, value.encode()) for relation_id, value in rows))
        for end_lsn, rows in json.loads((directory / "transactions.json").read_text())
    ]
    confirmed_path = directory / "confirmed"
    confirmed_lsn = LSN.parse(confirmed_path.read_text()) if confirmed_path.exists() else LSN(0x100)
    if "prepare" in arguments:
        fail(turn)
        end_lsn = transactions[-1].end_lsn if transactions else 0x100
        prepared = {
            "server_version": turn.get("server_version", 180004),
            "system_id": turn.get("system_id", "7"),
            "timeline": turn.get("timeline", 1),
            "timeline_history": turn.get("timeline_history", []),
            "database": "db",
            "wal_lsn": turn.get("wal_lsn", format_lsn(end_lsn + 1)),
            "slot": {
                "name": "s",
                "confirmed_flush_lsn": turn.get("confirmed", str(confirmed_lsn)),
                "created": turn.get("created", False),
            },
            "tables": [],
        }
        sys.stdout.write(turn.get("output", json.dumps(prepared)))
        return
    (directory / "streamed").touch()
    start_lsn = max(confirmed_lsn, LSN.parse(arguments[arguments.index("--startpos") + 1]))
    to_send = [transaction for transaction in transactions if transaction.end_lsn > start_lsn]
    stream = encode_stream(to_send)[: turn.get("bytes")] + turn.get("garbage", "").encode()
    emitted_lsn = max(to_send[-1].end_lsn if to_send else start_lsn, LSN.parse(turn.get("idle", "0/0")))
    if "idle" in turn:
        stream += b"w %s 0\n" % turn["idle"].encode()
    commands = b""
    pieces = [stream[pos : pos + turn.get("piece", 1 << 16)] for pos in range(0, len(stream), turn.get("piece", 1 << 16))]
    wait_for_end = "--endpos-wait" in arguments
    is_written = False
    while True:
        if not pieces and not is_written:
            is_written = True
            if "linger" in turn:
                os.close(1)
                time.sleep(turn["linger"])
            fail(turn)
            if wait_for_end:
                os.close(1)
        ready, writable, _ = select.select([0], [1] if pieces else [], [])
        if writable:
            data = pieces.pop(0)
            while data:
                data = data[os.write(1, data) :]
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                os._exit(4)
            commands += data
            *lines, commands = commands.split(b"\n")
            for line in lines:
                note(directory / "commands", line.decode())
                if line.startswith(b"F "):
                    lsn = LSN.parse(line[2:].decode())
                    end = log_end(directory / "staging")
                    if end is None or lsn > max(end.lsn, account.read(directory / "staging").lsn) or lsn > emitted_lsn:
                        note(directory / "liar", f"{lsn} while the log ended at {end} and {emitted_lsn} was emitted")
                    # Write atomically, because the launcher may kill this process at any time.
                    temporary_path = confirmed_path.with_suffix(".tmp")
                    temporary_path.write_text(str(lsn))
                    temporary_path.rename(confirmed_path)
                elif line == b"q":
                    if turn.get("ignores_quit"):
                        time.sleep(60)
                    os._exit(turn.get("quit_exit", 0))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
