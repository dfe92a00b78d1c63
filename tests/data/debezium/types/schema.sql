-- Tables with columns of every built-in type, and what a change does to rows of each replica identity.
create schema "My Schema";
create type mood as enum ('sad', 'ok', 'happy');
create type pair as (a integer, b text);
create domain price as numeric(10,2);
create domain word as varchar(12);
create domain nested as price;

create table numbers (
  id integer primary key, i2 smallint, i4 integer, i8 bigint, o oid, f4 real, f8 double precision, n numeric, n12_2 numeric(12,2),
  n5 numeric(5), n5_m2 numeric(5,-2), n3_5 numeric(3,5), m money, b boolean, x xid, x8 xid8, d price, dd nested
);
create table times (
  id integer primary key, d date, t time, t0 time(0), t3 time(3), t6 time(6), tz timetz, tz0 timetz(0), ts timestamp, ts0 timestamp(0),
  ts3 timestamp(3), ts6 timestamp(6), tstz timestamptz, tstz0 timestamptz(0), tstz3 timestamptz(3), i interval, i3 interval(3),
  iym interval year to month, ids interval day to second
);
create table texts (
  id integer primary key, t text, v varchar, v10 varchar(10), c char, c5 char(5), bp bpchar, qc "char", n name, j json, jb jsonb,
  jp jsonpath, x xml, u uuid, e mood, w word, tv tsvector, tq tsquery
);
create table bits (id integer primary key, by bytea, b1 bit, b5 bit(5), b17 bit(17), vb bit varying, vb1 bit varying(1), vb20 bit varying(20));
create table places (
  id integer primary key, p point, ln line, ls lseg, b box, pa path, po polygon, c circle, i inet, ci cidr, m macaddr, m8 macaddr8
);
create table others (
  id integer primary key, r4 int4range, r8 int8range, rn numrange, rts tsrange, rtz tstzrange, rd daterange, mr int8multirange,
  lsn pg_lsn, sn txid_snapshot, psn pg_snapshot, td tid, i2v int2vector, ov oidvector, rc regclass, rt regtype, co pair
);
create table arrays (
  id integer primary key, i2 smallint[], i4 integer[], i8 bigint[], o oid[], f4 real[], f8 double precision[], n numeric[],
  n6_2 numeric(6,2)[], b boolean[], t text[], v varchar(10)[], c char(3)[], qc "char"[], d date[], tm time[], tz timetz[], ts timestamp[],
  ts3 timestamp(3)[], tstz timestamptz[], u uuid[], j json[], jb jsonb[], by bytea[], i inet[], ci cidr[], m macaddr[], m8 macaddr8[], r4 int4range[],
  rn numrange[], rts tsrange[], e mood[], bi bit(3)[], iv interval[], p point[], mo money[], na name[], vb varbit[], pr price[]
);

create table by_key (id integer primary key, a text, n integer not null, s text not null, u text default 'unset');
alter table by_key set (toast_tuple_target = 128);
alter table by_key alter a set storage external;
create table by_pair (a integer, b integer, v text, primary key (b, a));
create table by_index (id integer not null, v text, w text);
create unique index by_index_id on by_index (id);
alter table by_index replica identity using index by_index_id;
create table by_row (id integer primary key, a text, n integer, l integer[], by bytea);
alter table by_row replica identity full;
alter table by_row set (toast_tuple_target = 128);
alter table by_row alter a set storage external, alter l set storage external, alter by set storage external;
create table large (
  id integer primary key, n integer, t text, by bytea, jb jsonb, num numeric, l integer[], tl text[], bl bigint[], il bigint[], dl date[], ul uuid[],
  nl numeric[], v varchar, x xml, tv tsvector, bb bit varying, e mood[], jl jsonb[], fl double precision[], bol boolean[], sl smallint[],
  vl varchar[], tsl timestamp[], tzl timestamptz[], tyl time[], byl bytea[], nul text[]
);
alter table large set (toast_tuple_target = 128);
alter table large alter t set storage external, alter by set storage external, alter jb set storage external,
  alter num set storage external, alter l set storage external, alter tl set storage external, alter bl set storage external,
  alter dl set storage external, alter ul set storage external, alter nl set storage external, alter v set storage external,
  alter x set storage external, alter tv set storage external, alter bb set storage external, alter e set storage external,
  alter jl set storage external, alter fl set storage external, alter bol set storage external, alter sl set storage external,
  alter vl set storage external, alter tsl set storage external, alter tzl set storage external, alter tyl set storage external,
  alter byl set storage external;
create table by_row_only (a integer, b text);
alter table by_row_only replica identity full;
create table by_row_unique (a integer not null, b text, c integer);
create unique index by_row_unique_c on by_row_unique (c);
create unique index by_row_unique_a on by_row_unique (a);
alter table by_row_unique replica identity full;
create table by_other_index (id integer primary key, b text not null, c text);
create unique index by_other_index_b on by_other_index (b);
alter table by_other_index replica identity using index by_other_index_b;
create table keyless (id integer, v text);
create table "My Schema"."Odd Table" ("Odd Column" integer primary key, "ä" text, "a.b" text, "select" text);
create table parts (id integer primary key, v text) partition by range (id);
create table parts_low partition of parts for values from (0) to (100);
create table parts_high partition of parts for values from (100) to (200);
create table altered (id integer primary key, a integer);
