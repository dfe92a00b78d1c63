"""The output plugin debezium on the command line."""

import json

import postgres

from support.cli_process import CLI
from support.logical_stream import Both


def test_on_the_command_line(pg18: postgres.Cluster) -> None:
    with pg18.database() as database:
        both = Both(database, "pgoutput")
        both.run("create table t (id int primary key, n numeric(8,2), at timestamptz)")
        both.begin()
        both.run("insert into t values (1, 12.5, '2026-11-21 01:02:03.4Z'), (2, null, null)")
        both.run("select pg_logical_emit_message(true, 'p', 'c')")
        end = str(both.query("select pg_current_wal_insert_lsn()")[0][0])
        options = ["--output", "debezium", "-o", "topic.prefix=shop", "-o", "decimal.handling.mode=string"]
        with CLI("-d", database.dsn, "-S", both.slots[1], "--publication", "p", *options, "--endpos", end, "--endpos-wait") as cli:
            (lsn, record), (last_lsn, _), (_, message) = cli.records()
            cli.say(f"F {last_lsn}\n")
            assert cli.quit() == 0, cli.stderr
        event = json.loads(record)
        assert event["after"] == {"id": 1, "n": "12.50", "at": "2026-11-21T01:02:03.400000Z"}
        assert (event["op"], event["source"]["name"], event["source"]["db"]) == ("c", "shop", database.name)
        assert event["source"]["lsn"] == int(lsn)
        # The header of a transaction's last record has the end of the transaction: it can be confirmed.
        confirmed = both.query(f"select confirmed_flush_lsn from pg_replication_slots where slot_name = '{both.slots[1]}'")
        assert confirmed == [(str(last_lsn),)]
        assert json.loads(message)["message"] == {"prefix": "p", "content": "Yw=="}
        both.connection.close()
