-- Types of extensions that the connector knows by name.
create extension hstore;
create extension citext;
create extension ltree;
create extension isn;
create table kinds (id integer primary key, h hstore, c citext, l ltree, i isbn, hl hstore[], cl citext[], ll ltree[], x xml, xl xml[], e ean13);
create table large (id integer primary key, n integer, h hstore);
alter table large set (toast_tuple_target = 128);
alter table large alter h set storage external;
