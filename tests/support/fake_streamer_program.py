"""The program of the fake streamer: python fake_streamer_program.py DIRECTORY prepare OPTIONS. See fake_streamer.py.

After ``prepare`` it reads the arguments of a stream from stdin, as ``cdcpipe prepare --then-stream`` does.

Tests start it hundreds of times, and its imports would take most of its CPU time. So it imports little: nothing of the project, and
no installed package (python -I -S). What it reads of the staging directory is the format that spark_sink/staging/log.py describes.
"""

import json
import os
import select
import signal
import sys
import time

START_LSN = 0x100


def parse_lsn(text: str) -> int:
    high, low = text.split("/")
    return int(high, 16) << 32 | int(low, 16)


def format_lsn(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def read(path: str) -> str | None:
    try:
        with open(path) as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def note(path: str, text: str) -> None:
    with open(path, "a") as stream:
        stream.write(text + "\n")


def durable_lsn(staging: str) -> int:
    """Return the LSN up to which everything is durable: the end of the segments, of the removed ones, or of the account."""
    ends = [0]
    if (text := read(f"{staging}/known.json")) is not None:
        ends.append(parse_lsn(json.loads(text)["lsn"]))
    if (text := read(f"{staging}/removed.json")) is not None:
        ends.append(parse_lsn(json.loads(text)["position"].partition(":")[2]))
    epochs = sorted(name for name in os.listdir(staging) if name.isdigit())
    for epoch in epochs[-1:]:
        ends.append(parse_lsn(json.loads(read(f"{staging}/{epoch}/epoch.json") or "")["start_lsn"]))
        ends += [int(name[17:33], 16) for name in os.listdir(f"{staging}/{epoch}") if name.endswith(".cdc")]
    return max(ends)


def encode_stream(transactions: list) -> bytes:
    described, parts = set(), []
    for _, pieces in transactions:
        for relation_id, description, rest in pieces:
            if relation_id and relation_id not in described:
                described.add(relation_id)
                parts.append(description)
            parts.append(rest)
    return bytes.fromhex("".join(parts))


def fail(turn: dict) -> None:
    if "stderr" in turn:
        sys.stderr.write(turn["stderr"])
        sys.stderr.flush()
    if "signal" in turn:
        os.kill(os.getpid(), turn["signal"])
        time.sleep(60)
    if "exit" in turn:
        os._exit(turn["exit"])


def read_arguments() -> list[str]:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(4)
        line += byte
    return list(json.loads(line))


def run(directory: str, arguments: list[str]) -> None:
    is_look = "prepare" in arguments and os.path.exists(f"{directory}/streamed")
    starts, turns_name = ("looks", "looks.json") if is_look else ("starts", "turns.json")
    number = len((read(f"{directory}/{starts}") or "").splitlines())
    note(f"{directory}/{starts}", json.dumps(arguments))
    note(f"{directory}/temporary", os.environ.get("TMPDIR", ""))
    turns = json.loads(read(f"{directory}/{turns_name}") or "[]")
    turn = turns[number] if number < len(turns) else {}
    transactions = json.loads(read(f"{directory}/transactions.json") or "")
    confirmed_path = f"{directory}/confirmed"
    confirmed_lsn = parse_lsn(read(confirmed_path) or format_lsn(START_LSN))
    if "prepare" in arguments:
        fail(turn)
        end_lsn = transactions[-1][0] if transactions else START_LSN
        prepared = {
            "server_version": turn.get("server_version", 180004),
            "system_id": turn.get("system_id", "7"),
            "timeline": turn.get("timeline", 1),
            "timeline_history": turn.get("timeline_history", []),
            "database": "db",
            "wal_lsn": turn.get("wal_lsn", format_lsn(end_lsn + 1)),
            "slot": {
                "name": "s",
                "confirmed_flush_lsn": turn.get("confirmed", format_lsn(confirmed_lsn)),
                "created": turn.get("created", False),
            },
            "tables": turn.get("tables", []),
        }
        sys.stdout.write(turn.get("output", json.dumps(prepared) + "\n"))
        sys.stdout.flush()
        if "output" not in turn and "--then-stream" in arguments:
            run(directory, read_arguments())
        return
    note(f"{directory}/streamed", "")
    start_lsn = max(confirmed_lsn, parse_lsn(arguments[arguments.index("--startpos") + 1]))
    to_send = [transaction for transaction in transactions if transaction[0] > start_lsn]
    stream = encode_stream(to_send)[: turn.get("bytes")]
    emitted_lsn = max(to_send[-1][0] if to_send else start_lsn, parse_lsn(turn.get("idle", "0/0")))
    if "idle" in turn:
        stream += b"w %s 0\n" % turn["idle"].encode()
    stream += turn.get("garbage", "").encode()
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
                note(f"{directory}/commands", line.decode())
                if line.startswith(b"F "):
                    lsn = parse_lsn(line[2:].decode())
                    durable = durable_lsn(f"{directory}/staging")
                    if lsn > durable or lsn > emitted_lsn:
                        shown = ", ".join(map(format_lsn, (lsn, durable, emitted_lsn)))
                        note(f"{directory}/liar", f"confirmed, durable, emitted: {shown}")
                    # Write atomically, because the launcher may kill this process at any time.
                    with open(f"{confirmed_path}.tmp", "w") as stream_file:
                        stream_file.write(format_lsn(lsn))
                    os.replace(f"{confirmed_path}.tmp", confirmed_path)
                elif line == b"q":
                    if turn.get("ignores_quit"):
                        time.sleep(60)
                    os._exit(turn.get("quit_exit", 0))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run(sys.argv[1], sys.argv[2:])
