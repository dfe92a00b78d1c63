-- What scripts/record-stream records, one statement after the other, each by itself. A statement ends with a semicolon at the
-- end of a line. "-- session NAME" says who runs what follows; at "-- slots" the slots are made: from there on all is recorded.

-- session one
create schema "Odd schema";
create type mood as enum ('sad', 'ok', 'happy');
create type pair as (x int, y text);
create type span as range (subtype = int);
create domain price as numeric(8,2);
create domain "Odd schema"."Mood" as mood;
create table plain (id int primary key, v text, n numeric(10,2));
create table everything (id bigint primary key, b boolean, i2 smallint, f4 real, f8 double precision, n numeric, c char(5),
  vc varchar(10), by bytea, d date, t time(3), ts timestamp, tz timestamptz(0), iv interval, u uuid, j jsonb, a int[], x bit(3),
  ip inet, m mood, ms mood[], p pair, s span, pr price, om "Odd schema"."Mood", l pg_lsn);
create table full_identity (a int, b text);
alter table full_identity replica identity full;
create table by_index (a int, k text not null, v text);
create unique index by_index_k on by_index (k);
alter table by_index replica identity using index by_index_k;
create table no_identity (v text);
alter table no_identity replica identity nothing;
create table toasted (id int primary key, big text, n int);
alter table toasted alter big set storage external;
create table changing (id int primary key, a text);
create table "Odd schema"."Ta ble" ("Co l" int primary key, "quo""te" text, "new
line" text, "überschrift" text);
create table parts (id int primary key, v text) partition by range (id);
create table parts_low partition of parts for values from (0) to (100);
create table parts_high partition of parts for values from (100) to (200);
create table child (id int primary key, parent int references plain);
create table nothing ();
-- Of this one the publication leaves out what makes its rows large on the server: a transaction of few bytes is streamed.
create table large (id int primary key, v int, pad text default repeat('x', 7000));
alter table large alter pad set storage plain;
create publication p for table plain, everything, full_identity, by_index, no_identity, toasted, changing, "Odd schema"."Ta ble",
  parts, child, nothing, large (id, v);
select pg_replication_origin_create('elsewhere');
-- slots

-- Values, and nothing in their place
insert into plain values (1, 'one', 1.50), (2, '', null), (3, null, -0.01), (4, E'tab\there, line\nbreak, quote '' and \\', 1e7);
insert into everything values (1, true, -5, 0.1, 1e-300, 12345678901234567890.123456789, 'abc', 'été', '\x00ff', '2026-11-21',
  '10:42:00.123', '2026-11-21 10:42:00.5', '2026-11-21 10:42:00+02', '1 year 2 days 03:04:05', '00000000-0000-4000-8000-000000000001',
  '{"a": [1, null, "ü"]}', '{{1,2},{3,null}}', '101', '10.0.0.0/8', 'happy', '{sad,ok}', '(1,"a b")', '[1,5)', 19.99, 'ok', '0/16B3748');
insert into everything values (2, false, null, 'NaN', '-Infinity', 'NaN', '', '', '', 'infinity', '24:00:00', '-infinity', '0044-03-15 BC',
  '-1 month', null, 'null', '{}', null, '::1', null, '{}', '(,)', 'empty', 0, null, '0/0');
insert into everything (id) values (3);
insert into "Odd schema"."Ta ble" values (1, E'a\nw 0/0 5\nb', E'\u202e\x1b[31m', '世界');
insert into nothing default values;

-- Replica identities
update plain set v = 'uno' where id = 1;
update plain set id = 10 where id = 1;
delete from plain where id = 2;
insert into full_identity values (1, 'x'), (1, 'x'), (null, null);
update full_identity set b = 'y' where a = 1;
delete from full_identity where a is null;
insert into by_index values (1, 'k', 'v');
update by_index set v = 'w';
update by_index set k = 'l';
delete from by_index;
insert into no_identity values ('v');
insert into toasted values (1, repeat('abcdefghij', 300), 1);
update toasted set n = 2;
update toasted set id = 2;
update toasted set big = null;
insert into parts values (1, 'low'), (101, 'high');
update parts set id = 150 where id = 1;

-- Truncate
insert into child values (1, 3);
truncate child;
truncate plain, child restart identity cascade;

-- Savepoints, and a transaction that leaves nothing
begin;
insert into plain values (20, 'kept', 1);
savepoint a;
insert into plain values (21, 'undone', 1);
rollback to a;
savepoint b;
insert into plain values (22, 'kept', 1);
commit;
begin;
insert into plain values (23, 'undone', 1);
rollback;

-- Changes of shape, in the middle of a transaction as well
begin;
insert into changing values (1, 'a');
alter table changing add column c int default 7;
insert into changing values (2, 'b', 2);
alter table changing drop column a;
insert into changing values (3, 3);
alter table changing rename c to d;
insert into changing values (4, 4);
alter table changing alter d type text using 'T' || d;
insert into changing values (5, 'five');
commit;
alter table changing rename to changed;
insert into changed values (6, 'six');
alter table changed replica identity full;
update changed set d = 'sechs' where id = 6;

-- Messages
begin;
select pg_logical_emit_message(true, 'outbox', '{"order": 1}');
insert into plain values (30, 'between messages', 1);
select pg_logical_emit_message(false, 'heartbeat', 'beat');
select pg_logical_emit_message(true, 'bytes', '\x00ff00'::bytea);
commit;

-- Transactions from elsewhere
select pg_replication_origin_session_setup('elsewhere');
begin;
select pg_replication_origin_xact_setup('0/ABCD1234', '2026-11-21 10:42:00+00');
insert into plain values (31, 'from elsewhere', 1);
commit;
select pg_replication_origin_session_reset();

-- Large: streamed in several blocks, interleaved with another, and with small ones between
begin;
insert into large select g from generate_series(1, 25) g;
-- session two
begin;
insert into large select g from generate_series(101, 125) g;
-- session three
insert into plain values (40, 'between blocks', 1);
-- session one
insert into large select g from generate_series(26, 40) g;
update large set v = id where id <= 2;
delete from large where id = 3;
select pg_logical_emit_message(true, 'in a block', 'x');
-- session two
insert into large select g from generate_series(126, 140) g;
truncate child;
insert into everything (id, m, ms) values (5, 'sad', '{happy}');
commit;
-- session one
insert into large select g from generate_series(41, 55) g;
commit;

-- Undone: a savepoint, one within another, all of it
begin;
insert into large select g from generate_series(201, 215) g;
savepoint a;
insert into large select g from generate_series(216, 230) g;
rollback to a;
savepoint b;
insert into large select g from generate_series(231, 240) g;
savepoint c;
insert into large select g from generate_series(241, 255) g;
rollback to b;
insert into large values (260);
commit;
begin;
alter table changed add column gone int;
insert into changed values (7, 'gone', 7);
insert into large select g from generate_series(301, 320) g;
rollback;
insert into changed values (7, 'seven');

-- Two-phase commit: small and large, committed and rolled back
begin;
insert into plain values (50, 'prepared', 1);
prepare transaction 'small, committed';
begin;
insert into plain values (51, 'prepared', 1);
prepare transaction 'small, rolled back';
insert into plain values (52, 'between PREPARE and COMMIT PREPARED', 1);
commit prepared 'small, committed';
rollback prepared 'small, rolled back';
begin;
insert into large select g from generate_series(401, 420) g;
savepoint a;
insert into large select g from generate_series(421, 440) g;
rollback to a;
prepare transaction 'large, committed';
begin;
insert into large select g from generate_series(501, 520) g;
prepare transaction 'large, rolled back';
rollback prepared 'large, rolled back';
commit prepared 'large, committed';
insert into plain values (99, 'last', 1);
