insert into numbers values
  (1, 1, 2, 3, 4, 1.5, 2.5, 3.25, 4.25, 5, 600, 0.00123, '12.34', true, '123', '12345678901', 1.5, 2.25),
  (2, -32768, -2147483648, -9223372036854775808, 4294967295, '1e-10', '1e300', 12345678901234567890.123456789, -0.01, -99999, -12300, -0.00999, '-1234567.89', false, '4294967295', '0', -0.01, 0),
  (3, 32767, 2147483647, 9007199254740993, 0, '1e30', '123456789.123456789', 1e40, 9999999999.99, 0, null, 0, '0', null, null, null, 99999999.99, null),
  (4, 0, 0, 0, 2147483648, '-0', '-0', 0, 0, 127, null, 0.00001, '0.01', null, null, null, 1.27, 1.28),
  (5, 0, 0, 0, 1, 'NaN', 'NaN', 1.500, 1.28, 128, null, 0, '92233720368547758.07', null, null, null, 327.68, -1.28),
  (6, 0, 0, 0, 1, 'Infinity', 'Infinity', -0.0000001, -1.28, -128, null, 0, '1', null, null, null, -327.68, -1.29),
  (7, 0, 0, 0, 1, '-Infinity', '-Infinity', 100, 655.36, -129, null, 0, '1', null, null, null, 0.01, 0.1),
  (8, 100, 1000000, 1000000000000, 1, 3.1415927, 3.141592653589793, 256, 0.1, 255, null, 0, '1', null, null, null, 0.01, 0.1),
  (9, 100, 1000000, 1000000000000, 1, 0.001, 0.001, 1.10, 0.1, 255, null, 0, '1', null, null, null, 0.01, 0.1),
  (10, 100, 1000000, 1000000000000, 1, 9999999, 9999999, -1, 0.1, 255, null, 0, '1', null, null, null, 0.01, 0.1),
  (11, 100, 1000000, 1000000000000, 1, 10000000, 10000000, 65535.5, 0.1, 255, null, 0, '1', null, null, null, 0.01, 0.1),
  (12, 100, 1000000, 1000000000000, 1, 0.0001, 0.0001, -128, 0.1, 255, null, 0, '1', null, null, null, 0.01, 0.1),
  (13, 100, 1000000, 1000000000000, 1, 12345678, 1e21, 9007199254740993, 0.1, 255, null, 0, '1', null, null, null, 0.01, 0.1),
  (14, 100, 1000000, 1000000000000, 1, 1e-37, 4.9e-324, 1e-20, 0.1, 255, null, 0, '1', null, null, null, 0.01, 0.1),
  (15, 100, 1000000, 1000000000000, 1, 3.4028235e38, 1.7976931348623157e308, 123456789012.3, 12345.1, 255, null, 0, '1', null, null, null, 0.01, 0.1);
insert into numbers (id) values (16);
insert into numbers (id, n, n12_2) values (17, 'NaN', 'NaN');
insert into numbers (id, n) values (18, 'Infinity'), (19, '-Infinity');

insert into times values
  (1, '2026-11-21', '12:34:56.789', '12:34:56', '12:34:56.789', '12:34:56.789012', '12:34:56.789+02', '12:34:56+05:30', '2026-11-21 12:34:56.789',
   '2026-11-21 12:34:56', '2026-11-21 12:34:56.789', '2026-11-21 12:34:56.789012', '2026-11-21 12:34:56.789+02', '2026-11-21 12:34:56Z', '2026-11-21 12:34:56.789Z',
   '1 year 2 mons 3 days 04:05:06.789', '1.234 s', '1-2', '1 04:05:06'),
  (2, '1970-01-01', '00:00', '00:00', '00:00', '00:00', '00:00+00', '00:00-12:30', '1970-01-01', '1970-01-01', '1970-01-01', '1970-01-01', '1970-01-01Z', '1970-01-01Z', '1970-01-01Z',
   '0', '0', '0', '0'),
  (3, '1969-12-31', '23:59:59.999999', '23:59:59', '23:59:59.999', '23:59:59.999999', '23:59:59.999999+00', '23:59:59-08', '1969-12-31 23:59:59.999999',
   '1969-12-31 23:59:59', '1969-12-31 23:59:59.999', '1969-12-31 23:59:59.999999', '1969-12-31 23:59:59.999999Z', '1969-12-31 23:59:59Z', '1969-12-31 23:59:59.999Z',
   '-1 year -2 mons -3 days -04:05:06.789', '-1.5 s', '-1-2', '-1 04:05:06'),
  (4, '0001-01-01', '01:02:03.1', '01:02:03', '01:02:03.1', '01:02:03.000001', '01:02:03.1-03:30', '01:02:03+14', '0001-01-01', '0001-01-01', '0001-01-01', '0001-01-01 00:00:00.000001', '0001-01-01Z', '0001-01-01Z', '0001-01-01Z',
   '1 mon', '1 day', '1 mon', '1 day'),
  (5, '9999-12-31', '00:00:00.12', '00:00:01', '00:00:00.12', '00:00:00.12', '00:00:00.12+00', '00:00+00', '9999-12-31 23:59:59.999999', '9999-12-31', '9999-12-31', '9999-12-31', '9999-12-31 23:59:59.999999Z', '9999-12-31Z', '9999-12-31 00:00:00.12Z',
   '100 years -15 days 00:00:00.000001', '-00:00:01', '100-11', '-10 days 3 hours'),
  (6, '1582-10-10', '10:00', '10:00', '10:00', '10:00', '10:00+00:30', '10:00+00', '1582-10-10 01:00', '1582-10-10', '1582-10-10', '1582-10-10', '1582-10-10Z', '1582-10-10Z', '1582-10-10Z',
   '1 mon -1 day', '1 hour', '2 years', '90 min'),
  (7, '1900-01-01', '10:00', '10:00', '10:00', '10:00', '10:00+01', '10:00+00', '1700-06-15 12:00:00.5', '1700-06-15', '1700-06-15', '1700-06-15', '1700-06-15 12:00:00.5Z', '1700-06-15Z', '1700-06-15Z',
   '1 year', '1 min', '11 mons', '1 s');
insert into times (id) values (8);
insert into times (id, d) values (9, '10000-01-01'), (10, '0044-03-15 BC'), (11, '5874897-12-31'), (12, '4713-01-01 BC');
insert into times (id, ts, ts3, ts6) values (13, '10000-01-01 01:02:03.5', '10000-01-01', '12345-06-07 08:09:10.111213'), (14, '0044-03-15 10:00:00 BC', '0044-03-15 BC', '0001-12-31 BC');
insert into times (id, tstz, tstz3) values (15, '10000-01-01 01:02:03.5Z', '10000-01-01Z'), (16, '0044-03-15 10:00:00Z BC', '0044-03-15Z BC'), (17, '0001-12-31 23:00:00.25Z BC', '0002-01-01Z BC');
insert into times (id, d) values (18, 'infinity'), (19, '-infinity');
insert into times (id, ts, ts0, ts3, ts6) values (20, 'infinity', 'infinity', 'infinity', 'infinity'), (21, '-infinity', '-infinity', '-infinity', '-infinity');
insert into times (id, tstz, tstz0) values (22, 'infinity', 'infinity'), (23, '-infinity', '-infinity');
insert into times (id, t, t0, t3, t6) values (24, '24:00', '24:00', '24:00', '24:00');
insert into times (id, tz, tz0) values (25, '24:00+00', '24:00+02'), (26, '00:00:00-15:59', '12:00:00+15:59');

insert into texts values
  (1, 'plain', 'v', 'v10', 'c', 'c', 'bp', 'q', 'name', '{"a": [1, "x"]}', '{"a": [1, "x"]}', '$.a[*] ? (@ > 1)', '<a b="c"/>',
   '00000000-0000-0000-0000-0123456789ab', 'ok', 'word', $$'a':1 'it''s':2$$, $$'a' & !'b'$$),
  (2, '', '', '', '', '', '', '', '', '""', '""', '$', '', 'ffffffff-ffff-ffff-ffff-ffffffffffff', 'sad', '', '', ''),
  (3, E'a"b\\c/d\b\f\n\r\t\x01\x1f\x7f', E'\u00e4\u00f6\u4e16\U0001f600', E'\u2028\u2029<&>''', '"', 'ab', '  ', '"', 'a"b', E'{"a": "\\u00e4\\n \u00e4"}', '{"b": 1.10, "a": null}', '$.a', '<a>"&amp;"</a>',
   'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11', 'happy', E'a"b', $$'a\b':1A$$, $$'a':*$$),
  (4, repeat('x', 300), repeat('é', 200), 'abcdefghij', 'x', 'abcde', repeat(' ', 20), '\', repeat('n', 63), 'null', 'null', '$', 'x', null, null, null, null, null);
insert into texts (id) values (5);
insert into bits values
  (1, '\x00ff5c22', B'1', B'10101', B'10000000000000001', B'101', B'1', B'00000000000000000001'),
  (2, '', B'0', B'00000', B'00000000000000000', B'', B'', B''),
  (3, '\xfbefbe', B'1', B'11111', B'11111111111111111', B'1000000001', B'0', B'1'),
  (4, '\x01', B'0', B'01000', B'00000000100000000', B'00000000', B'1', B'00000000111111110000');
insert into bits (id) values (5);
insert into bits (id, by) values (6, convert_to(repeat('xyz', 200), 'UTF8'));
insert into places values
  (1, '(1,2)', '{1,2,3}', '[(1,2),(3,4)]', '(3,4),(1,2)', '((1,2),(3,4))', '((1,2),(3,4),(5,6))', '<(1,2),3>', '192.168.0.1/24', '10.0.0.0/8', '08:00:2b:01:02:03', '08:00:2b:01:02:03:04:05'),
  (2, '(-1.5,1e30)', '{-1.5,2,1e-10}', '[(0.1,0.2),(0.3,0.4)]', '(1,1),(0,0)', '[(1,2),(3,4),(5,6)]', '((0,0),(1,0))', '<(0.1,0.2),0>', '::1', '2001:db8::/32', 'ff:ff:ff:ff:ff:ff', '00:00:00:00:00:00:00:00'),
  (3, '(123456.789,0.0001)', null, null, null, null, null, null, '10.1.2.3', '10.1.2.3/32', null, null);
insert into places (id) values (4);
insert into others values
  (1, '[1,5)', '[1,5)', '(,3.5]', '[2026-01-01,2026-02-01)', '[2026-01-01Z,2026-02-01Z)', '[2026-01-01,2026-02-01)', '{[1,5),[7,9)}', '16/B374D848',
   '10:20:10,14,15', '10:20:10,14,15', '(1,2)', '1 2', '1 2', 'pg_class', 'integer', '(1,"a b")'),
  (2, 'empty', '(,)', 'empty', '(,)', '[,infinity]', '(,)', '{}', '0/0', null, null, '(0,0)', '', '', 'pg_type', 'text', '(,)');
insert into others (id) values (3);
insert into arrays (id, i2, i4, i8, o, f4, f8, n, n6_2, b, t, v, c, qc, d, tm, tz, ts, ts3, tstz, u, j, jb, by, i, ci, m, m8, r4, rn, rts, e)
  values (1, '{1,-2}', '{1,NULL,3}', '{9007199254740993}', '{1,4294967295}', '{1.5,NaN}', '{0.1,Infinity}', '{1.5,10}', '{1.5,-0.01}', '{t,f,NULL}',
   $${a,"b\"c","d\\e",NULL,"NULL","","x,y","{z}"}$$, '{a}', '{a,bcd}', '{a}', '{2026-11-21,1970-01-01}', '{12:34:56.789}', '{12:34:56+02}', '{2026-11-21 12:34:56.789}',
   '{2026-11-21 12:34:56.789}', '{2026-11-21 12:34:56.789Z}', '{00000000-0000-0000-0000-0123456789ab}', array['{"a": 1}'::json], array['{"a": 1}'::jsonb], '{"\\x00ff"}',
   '{10.0.0.1,::1}', '{10.0.0.0/8}', '{08:00:2b:01:02:03}', '{08:00:2b:01:02:03:04:05}', '{"[1,5)"}', '{"(,3.5]"}', '{"[2026-01-01,2026-02-01)"}', '{ok}');
insert into arrays (id, i4, t, e, n) values (2, '{}', '{}', '{}', '{}'), (3, null, null, null, null);
insert into arrays (id, bi, iv, p, mo, na, vb, pr) values (4, '{101}', '{1 day}', '{"(1,2)"}', '{1.5}', '{a}', '{101}', '{1.5}');
insert into arrays (id, d, ts, tstz) values (5, '{1969-12-31}', '{1969-12-31 23:59:59.999999}', '{2026-11-21 12:00:00+02}');

insert into arrays (id, i4) values (6, '{{1,2},{3,4}}');
insert into arrays (id, t) values (7, '{{a,b},{c,d}}');
insert into arrays (id, i4) values (8, '[0:1]={1,2}');

begin;
insert into by_key values (1, repeat('x', 2100), 1, 's', 'u'), (2, 'short', 2, 's2', null);
update by_key set n = 3 where id = 1;
update by_key set id = 11 where id = 1;
update by_key set a = null where id = 2;
update by_key set id = 12, a = 'new' where id = 2;
delete from by_key;
insert into by_pair values (1, 2, 'v'), (3, 4, null);
update by_pair set v = 'w' where a = 1;
update by_pair set a = 5 where a = 3;
delete from by_pair;
insert into by_index values (1, 'v', 'w');
update by_index set v = 'x';
update by_index set id = 2;
delete from by_index;
insert into by_row values (1, repeat('y', 2100), 1, array(select generate_series(1, 50)), decode(repeat('ab', 200), 'hex'));
update by_row set n = 2;
update by_row set id = 3, n = null;
delete from by_row;
insert into by_row_only values (1, 'a'), (2, null);
update by_row_only set a = 3 where a = 1;
delete from by_row_only;
insert into by_row_unique values (1, 'a', 1);
update by_row_unique set b = 'b';
update by_row_unique set a = 2;
update by_row_unique set c = 3;
delete from by_row_unique;
insert into by_other_index values (1, 'b', 'c');
update by_other_index set c = 'd';
update by_other_index set id = 2;
update by_other_index set b = 'e';
delete from by_other_index;
insert into keyless values (1, 'v');
insert into "My Schema"."Odd Table" values (1, 'a', 'b', 'c');
update "My Schema"."Odd Table" set "ä" = 'z';
delete from "My Schema"."Odd Table";
insert into parts values (1, 'low'), (150, 'high');
update parts set v = 'moved', id = 151 where id = 1;
delete from parts;
commit;

insert into large values (1, 1, repeat('t', 200), decode(repeat('ab', 200), 'hex'), to_jsonb(repeat('j', 200)), ('1' || repeat('23', 200))::numeric, array(select generate_series(1, 60)),
  array(select 'x' || g from generate_series(1, 60) g), array(select generate_series(1, 60)), null, array(select date '2026-01-01' + g from generate_series(1, 60) g),
  array(select '00000000-0000-0000-0000-0123456789ab'::uuid from generate_series(1, 60)), array(select g::numeric from generate_series(1, 100) g),
  repeat('v', 200), ('<a>' || repeat('x', 200) || '</a>')::xml, (select string_agg('w' || g, ' ') from generate_series(1, 100) g)::tsvector, repeat('10', 1000)::varbit,
  array(select 'ok'::mood from generate_series(1, 60)), array(select '{"a": 1}'::jsonb from generate_series(1, 60)), array(select g + 0.5 from generate_series(1, 60) g),
  array(select true from generate_series(1, 200)), array(select g::smallint from generate_series(1, 60) g), array(select 'v' || g from generate_series(1, 100) g),
  array(select timestamp '2026-01-01' from generate_series(1, 60)), array(select timestamptz '2026-01-01Z' from generate_series(1, 60)),
  array(select time '01:02' from generate_series(1, 60)), array(select '\xabcd'::bytea from generate_series(1, 60)), null);
update large set n = 2;

truncate by_key;
truncate by_pair, by_index restart identity;
truncate parts;
select pg_logical_emit_message(true, 'prefix', 'content');
select pg_logical_emit_message(false, 'q"', '\x00ff'::bytea);
begin;
insert into keyless values (2, 'before');
select pg_logical_emit_message(true, '', '');
select pg_logical_emit_message(false, 'out of order', 'x');
savepoint s;
insert into keyless values (3, 'undone');
rollback to s;
insert into keyless values (4, 'after');
commit;

select pg_replication_origin_create('elsewhere');
select pg_replication_origin_session_setup('elsewhere');
begin;
insert into keyless values (5, 'from elsewhere');
select pg_replication_origin_xact_setup('0/ABCDEF', '2026-01-02 03:04:05.678901Z');
commit;
insert into keyless values (6, 'from elsewhere, no position');
select pg_replication_origin_session_reset();
insert into altered values (1, 2);
alter table altered add column b text;
insert into altered values (2, 3, 'b');
alter table altered drop column a;
insert into altered values (3, 'c');
