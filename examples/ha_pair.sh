#!/usr/bin/env bash
# A highly available pair: two cdcpipe processes on one slot, of which one streams and the other one stands by.
#
#     PGDATABASE=shop examples/ha_pair.sh
#
# The active one is killed with -9, as if its machine had died, and the other one takes over where the confirmed changes end. The
# table, publication and slot that this makes, all with the name ha_pair, are removed at the end. libpq's variables say where the server is.
set -euo pipefail

name=ha_pair
directory=$(mktemp -d)

sql() { psql -X -q -A -t -c "$1"; }

# Wait until a command succeeds, for two minutes at most.
until_true() {
    for ((i = 0; i < 1200; i++)); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    echo "did not come true: $*" >&2
    return 1
}

is_active() { [ "$(sql "select active from pg_replication_slots where slot_name = '$name'")" = t ]; }
is_free() { ! is_active; }

clean_up() {
    kill "${first:-}" "${second:-}" 2>/dev/null || true
    wait
    until_true is_free
    sql "select pg_drop_replication_slot('$name')" >/dev/null
    sql "drop publication $name; drop table $name"
    rm -r "$directory"
}

sql "create table $name (id int primary key)"
cdcpipe prepare -S $name --publication $name --table public.$name -c >/dev/null
trap clean_up EXIT

# What a consumer has written counts as confirmed here (-A). One with a memory of its own would confirm by F on stdin.
mkfifo "$directory/commands"
exec 3<>"$directory/commands" # stdin has to stay open: its end would end them. They may share it, because nobody writes commands here
stand_by() { exec cdcpipe -S $name --publication $name -J -N -A --standby; }

stand_by >"$directory/first" <&3 &
first=$!
until_true is_active
stand_by >"$directory/second" <&3 &
second=$!

sql "insert into $name values (1)"
until_true grep '"value":1}' "$directory/first"
echo "the first one streams:  $(grep '"I"' "$directory/first")"

kill -9 $first
sql "insert into $name values (2)"
until_true grep '"value":2}' "$directory/second"
echo "the second took over:   $(grep '"value":2}' "$directory/second")"
