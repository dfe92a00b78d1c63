insert into kinds values
  (1, '"a"=>"1", "b"=>NULL, "q\"u"=>"b\\s, =>"', 'CiText "x"', 'a.b.c', '978-0-393-04002-9', null, array['A'::citext, 'b'], array['a.b'::ltree], '<a/>', '{<a/>}', '978-0-393-04002-9'),
  (2, '', '', '', '0-393-04002-X', null, '{}', null, null, null, null);
insert into kinds (id) values (3);
insert into kinds (id, hl) values (4, array['"a"=>"1"'::hstore]);
insert into large values (1, 1, hstore('k', repeat('x', 2100)));
update large set n = 2;
