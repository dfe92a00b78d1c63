-- DDL capture of cdcpipe: event triggers that tell a logical replication stream what happened to the tables.
--
-- `cdcpipe ddl install` runs this file as one transaction; `cdcpipe ddl install --print` shows what it runs. It can be run again, over
-- the same or an older version. In this file the words between @ stand for the schema (by default cdcpipe), its name as a literal, and
-- the settings as a JSON text.
--
-- Each trigger writes a transactional logical message with the prefix "cdcpipe.ddl" at the place in the transaction where the command
-- ran. The content is JSON in UTF-8; message.schema.json beside this file describes it, docs/operations/ddl.md explains it.
--
-- Rules that all functions here follow:
--
-- - They read the system catalogs only. They open and lock no table, so they never wait.
-- - SECURITY DEFINER with a fixed search_path: everybody's DDL works, whatever privileges and settings its session has. Nobody but
--   the owner may call the helper functions.
-- - A function that makes a text of a value, a type or an object's name also fixes the settings that decide the form of the text.
-- - Functions that run for each statement are in PL/pgSQL, which keeps their plans for the session. force_generic_plan makes it plan
--   each query once only.
-- - An error never fails the user's DDL, unless the setting "strict" is on. It becomes a message of the kind "failure", and a WARNING.
-- - A message is built inside an exception block (a subtransaction), but written outside of it. So no subtransaction needs an ID of
--   its own, and a transaction with thousands of DDL statements costs other sessions nothing.

-- Two sessions that install at the same time do it one after the other.
SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('cdcpipe.ddl'));

-- CREATE OR REPLACE keeps a function's owner, and its owner may replace it later. Whoever owns these functions gets the rights of
-- everybody who runs DDL. So nothing is installed into a schema that another ordinary user owns, or may create functions in.
DO $cdcpipe$
DECLARE
    trusted pg_catalog.oid[] := ARRAY(
        SELECT r.oid FROM pg_catalog.pg_roles r WHERE r.rolsuper OR r.rolname = current_user);
    wanted pg_catalog.name := @schema_name@;
BEGIN
    IF EXISTS (
        SELECT FROM pg_catalog.pg_namespace n WHERE n.nspname = wanted AND (
            n.nspowner <> ALL (trusted)
            OR EXISTS (SELECT FROM pg_catalog.aclexplode(n.nspacl) a
                WHERE a.privilege_type = 'CREATE' AND a.grantee <> ALL (trusted))
            OR EXISTS (SELECT FROM pg_catalog.pg_proc p WHERE p.pronamespace = n.oid AND p.proowner <> ALL (trusted))))
    THEN
        RAISE EXCEPTION 'the schema % belongs to another user, or another user may create functions in it', wanted
            USING ERRCODE = 'insufficient_privilege', HINT = 'name another schema, or drop this one';
    END IF;
    -- A schema that was there keeps its comment. One that another session creates now was not examined: then this fails.
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace n WHERE n.nspname = wanted) THEN
        CREATE SCHEMA @schema@;
        COMMENT ON SCHEMA @schema@ IS 'DDL capture of cdcpipe: cdcpipe ddl remove removes it';
    END IF;
END
$cdcpipe$;

-- What was installed: the version of this file, and the options of the command. `cdcpipe ddl` reads them from this function's text.
CREATE OR REPLACE FUNCTION @schema@.ddl_settings() RETURNS json
LANGUAGE sql IMMUTABLE
AS $cdcpipe$ SELECT @settings@::pg_catalog.json $cdcpipe$;
COMMENT ON FUNCTION @schema@.ddl_settings() IS @settings@;

-- A type as a column has it. pgoutput sends the same OID and modifier.
CREATE OR REPLACE FUNCTION @schema@.ddl_type(type oid, modifier integer) RETURNS json
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp SET quote_all_identifiers = off
AS $cdcpipe$
    SELECT json_build_object(
        'oid', t.oid::bigint, 'schema', n.nspname, 'name', t.typname, 'modifier', ddl_type.modifier,
        'text', format_type(t.oid, ddl_type.modifier))
    FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
    WHERE t.oid = ddl_type.type
$cdcpipe$;

-- The description of each of these relations that is a table and not temporary.
-- The settings give values as text the form that they have in the stream (SESSION_SETTINGS in cdcpipe/sql.py).
CREATE OR REPLACE FUNCTION @schema@.ddl_tables(relations oid[]) RETURNS json
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET jit = off
SET "DateStyle" = 'ISO, MDY' SET "IntervalStyle" = 'postgres' SET "TimeZone" = 'UTC' SET extra_float_digits = 3
SET bytea_output = 'hex' SET quote_all_identifiers = off
AS $cdcpipe$
BEGIN
    RETURN (SELECT coalesce(json_agg(json_build_object(
        'oid', c.oid::bigint,
        'schema', n.nspname,
        'name', c.relname,
        'kind', CASE c.relkind WHEN 'p' THEN 'partitioned' ELSE 'table' END,
        'persistence', CASE c.relpersistence WHEN 'u' THEN 'unlogged' ELSE 'permanent' END,
        'columns', (
            SELECT coalesce(json_agg(json_build_object(
                'number', a.attnum,
                'name', a.attname,
                'type', json_build_object(
                    'oid', a.atttypid::bigint, 'schema', tn.nspname, 'name', t.typname, 'modifier', a.atttypmod,
                    'text', format_type(a.atttypid, a.atttypmod)),
                'not_null', a.attnotnull,
                -- Its own, or that of its domain.
                'has_default', a.atthasdef AND a.attgenerated = '' OR t.typdefault IS NOT NULL,
                -- An array with one element of the column's type. (Its own text has the delimiter of this type: box has another one.)
                'missing', CASE WHEN a.atthasmissing THEN array_to_string(a.attmissingval, '') END,
                'identity', CASE a.attidentity WHEN 'a' THEN 'always' WHEN 'd' THEN 'by default' END,
                'generated', CASE a.attgenerated WHEN 's' THEN 'stored' WHEN 'v' THEN 'virtual' END,
                'comment', d.description
            ) ORDER BY a.attnum), '[]')
            FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid JOIN pg_namespace tn ON tn.oid = t.typnamespace
            LEFT JOIN pg_description d ON d.objoid = c.oid AND d.classoid = 'pg_class'::regclass AND d.objsubid = a.attnum
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
        'primary_key', (
            SELECT json_build_object(
                'oid', i.indexrelid::bigint, 'name', x.relname, 'columns', to_json((i.indkey::int2[])[0:i.indnkeyatts - 1]),
                'deferrable', NOT i.indimmediate)
            FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
            WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisvalid),
        -- The other unique indexes that ALTER TABLE ... REPLICA IDENTITY USING INDEX accepts.
        'unique_indexes', (
            SELECT coalesce(json_agg(json_build_object(
                'oid', i.indexrelid::bigint, 'name', x.relname, 'columns', to_json((i.indkey::int2[])[0:i.indnkeyatts - 1])
            ) ORDER BY i.indexrelid), '[]')
            FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
            WHERE i.indrelid = c.oid AND i.indisunique AND NOT i.indisprimary AND i.indisvalid AND i.indimmediate
            AND i.indpred IS NULL AND i.indexprs IS NULL
            AND NOT EXISTS (
                SELECT FROM unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) AS k (attnum)
                JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum AND NOT a.attnotnull)),
        'replica_identity', json_build_object(
            'kind', CASE c.relreplident WHEN 'd' THEN 'default' WHEN 'n' THEN 'nothing' WHEN 'f' THEN 'full' ELSE 'index' END,
            'index', (SELECT i.indexrelid::bigint FROM pg_index i WHERE i.indrelid = c.oid AND i.indisreplident),
            'columns', coalesce((
                SELECT to_json((i.indkey::int2[])[0:i.indnkeyatts - 1]) FROM pg_index i
                WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
                AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END), '[]')),
        'partition_of', (
            SELECT json_build_object('oid', p.oid::bigint, 'schema', pn.nspname, 'name', p.relname)
            FROM pg_inherits h JOIN pg_class p ON p.oid = h.inhparent JOIN pg_namespace pn ON pn.oid = p.relnamespace
            WHERE h.inhrelid = c.oid AND c.relispartition),
        'comment', (
            SELECT d.description FROM pg_description d
            WHERE d.objoid = c.oid AND d.classoid = 'pg_class'::regclass AND d.objsubid = 0)
    ) ORDER BY c.oid), '[]')
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = ANY (ddl_tables.relations) AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't');
END
$cdcpipe$;

-- These relations, and everything that inherits from them: a change of a partitioned table changes its partitions.
CREATE OR REPLACE FUNCTION @schema@.ddl_family(relations oid[]) RETURNS oid[]
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET jit = off
AS $cdcpipe$
DECLARE
    children oid[] := relations;
BEGIN
    LOOP
        children := ARRAY(
            SELECT h.inhrelid FROM pg_inherits h WHERE h.inhparent = ANY (children) AND h.inhrelid <> ALL (relations));
        EXIT WHEN cardinality(children) = 0;
        relations := relations || children;
    END LOOP;
    RETURN relations;
END
$cdcpipe$;

-- The description of each of these types, and of each type that contains one of them: a domain over it, a composite type or a range with
-- it, and the same with its arrays. A value of such a type has other texts, too. The row type of a table is left out, unless a column
-- has it. The catalog of dependencies has an index by what is depended on.
CREATE OR REPLACE FUNCTION @schema@.ddl_types(types oid[]) RETURNS json
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $cdcpipe$
BEGIN
    IF types IS NULL THEN
        RETURN '[]';
    END IF;
    RETURN (
    WITH RECURSIVE holders (type) AS (
        SELECT unnest(ddl_types.types)
        UNION
        SELECT CASE d.classid
            WHEN 'pg_type'::regclass THEN d.objid
            WHEN 'pg_class'::regclass THEN (SELECT c.reltype FROM pg_class c WHERE c.oid = d.objid)
        END
        FROM holders h
        JOIN pg_depend d ON d.refclassid = 'pg_type'::regclass AND d.refobjid = h.type
            AND d.classid IN ('pg_type'::regclass, 'pg_class'::regclass)
    )
    SELECT coalesce(json_agg(json_build_object(
        'oid', t.oid::bigint,
        'schema', n.nspname,
        'name', t.typname,
        'kind', CASE t.typtype WHEN 'e' THEN 'enum' WHEN 'c' THEN 'composite' WHEN 'd' THEN 'domain' WHEN 'r' THEN 'range'
            WHEN 'm' THEN 'multirange' ELSE 'base' END,
        'array', nullif(t.typarray, 0)::bigint,
        'labels', (SELECT json_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = t.oid),
        'attributes', (
            SELECT json_agg(json_build_object(
                'number', a.attnum, 'name', a.attname, 'type', @schema@.ddl_type(a.atttypid, a.atttypmod)) ORDER BY a.attnum)
            FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped),
        'base', CASE WHEN t.typtype = 'd' THEN @schema@.ddl_type(t.typbasetype, t.typtypmod) END
    ) ORDER BY t.oid), '[]')
    FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace LEFT JOIN pg_class c ON c.oid = t.typrelid
    WHERE t.oid IN (SELECT h.type FROM holders h)
    AND (c.oid IS NULL OR c.relpersistence <> 't' AND (c.relkind = 'c' OR c.relkind IN ('r', 'p') AND EXISTS (
        SELECT FROM pg_depend d WHERE d.refclassid = 'pg_type'::regclass AND d.refobjid IN (t.oid, t.typarray)
        AND d.classid = 'pg_class'::regclass AND d.objsubid > 0)))
    -- Each type has its array with it.
    AND NOT EXISTS (SELECT FROM pg_type e WHERE e.oid = t.typelem AND e.typarray = t.oid)
    AND NOT n.oid = pg_my_temp_schema());
END
$cdcpipe$;

-- The description of each of these publications. Later versions of PostgreSQL have more columns: to_jsonb(row) takes what there is.
CREATE OR REPLACE FUNCTION @schema@.ddl_publications(publications oid[]) RETURNS json
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $cdcpipe$
DECLARE
    schemas json := '{}';
    described json;
BEGIN
    IF publications IS NULL THEN
        RETURN '[]';
    END IF;
    IF current_setting('server_version_num')::integer >= 150000 THEN
        SELECT coalesce(json_object_agg(s.pnpubid, s.names), '{}') INTO schemas
        FROM (SELECT s.pnpubid, json_agg(n.nspname ORDER BY n.nspname) AS names
            FROM pg_publication_namespace s JOIN pg_namespace n ON n.oid = s.pnnspid
            WHERE s.pnpubid = ANY (publications) GROUP BY 1) s;
    END IF;
    SELECT coalesce(json_agg(json_build_object(
        'oid', p.oid::bigint,
        'name', p.pubname,
        'all_tables', p.puballtables,
        'via_root', p.pubviaroot,
        'publishes', array_remove(ARRAY[
            CASE WHEN p.pubinsert THEN 'insert' END, CASE WHEN p.pubupdate THEN 'update' END,
            CASE WHEN p.pubdelete THEN 'delete' END, CASE WHEN p.pubtruncate THEN 'truncate' END], NULL),
        'generated', CASE to_jsonb(p) ->> 'pubgencols' WHEN 's' THEN 'stored' END,
        'schemas', coalesce(schemas -> p.oid::text, '[]'),
        'tables', (
            SELECT coalesce(json_agg(json_build_object(
                'oid', r.prrelid::bigint, 'schema', n.nspname, 'name', c.relname,
                'columns', string_to_array(to_jsonb(r) ->> 'prattrs', ' ')::integer[],
                'has_filter', to_jsonb(r) ->> 'prqual' IS NOT NULL
            ) ORDER BY r.prrelid), '[]')
            FROM pg_publication_rel r JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
            -- From PostgreSQL 19 on, the exceptions of FOR ALL TABLES EXCEPT are there, too.
            WHERE r.prpubid = p.oid AND to_jsonb(r) ->> 'prexcept' IS DISTINCT FROM 'true')
    ) ORDER BY p.oid), '[]') INTO described
    FROM pg_publication p WHERE p.oid = ANY (publications);
    RETURN described;
END
$cdcpipe$;

-- The text of the client's query, or null: if statements are not to be captured, or if the text seems to hold a password.
-- The server knows the whole query only: that may be several statements, or a DO block, which also do something else. It is cut, because
-- a script of a megabyte that a program sends as one query would otherwise be in the message of each of its statements.
CREATE OR REPLACE FUNCTION @schema@.ddl_statement() RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $cdcpipe$
DECLARE
    query text := left(current_query(), 10000);
BEGIN
    RETURN CASE WHEN (@schema@.ddl_settings() ->> 'statements')::boolean
        AND query !~* $re$password(\s|/\*.*?\*/|--[^\n]*\n)*(=|:|'|"|\$|%|\||E'|U&')$re$
        AND query !~ $re$://[^/\s:@]*:[^/\s]*@$re$
        THEN query END;
END
$cdcpipe$;

-- The ID of the subtransaction (or the transaction) that the command runs in: the youngest ID that this session has locked, because a
-- subtransaction unlocks its ID when it ends. A stream of large transactions needs it: there the server says which subtransaction was
-- rolled back, but not to which one a logical message belongs.
CREATE OR REPLACE FUNCTION @schema@.ddl_xid() RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $cdcpipe$
BEGIN
    RETURN coalesce((
        SELECT l.transactionid::text::bigint FROM pg_locks l
        WHERE l.locktype = 'transactionid' AND l.pid = pg_backend_pid() AND l.mode = 'ExclusiveLock' AND l.granted
        ORDER BY age(l.transactionid) LIMIT 1
    ), (pg_current_xact_id()::text::numeric % 4294967296)::bigint);
END
$cdcpipe$;

-- Write a message. The content is UTF-8, whatever the database's encoding is. (With SQL_ASCII nobody knows what the bytes are.)
CREATE OR REPLACE FUNCTION @schema@.ddl_write(content text) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $cdcpipe$
BEGIN
    IF EXISTS (SELECT FROM pg_proc p WHERE p.proname = 'pg_logical_emit_message' AND p.pronamespace = 'pg_catalog'::regnamespace
        AND NOT has_function_privilege(p.oid, 'EXECUTE'))
    THEN
        RAISE WARNING 'cdcpipe: DDL is not captured, because % may not call pg_logical_emit_message', current_user;
        RETURN;
    END IF;
    PERFORM pg_logical_emit_message(true, 'cdcpipe.ddl', convert_to(
        content, CASE getdatabaseencoding() WHEN 'SQL_ASCII' THEN 'SQL_ASCII' ELSE 'UTF8' END));
END
$cdcpipe$;

-- The message for an error in one of the triggers.
CREATE OR REPLACE FUNCTION @schema@.ddl_failure(event text, tag text, state text, error text) RETURNS json
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $cdcpipe$
BEGIN
    RAISE WARNING 'cdcpipe: % was not captured: %', tag, error;
    RETURN json_build_object(
        'version', 1, 'kind', 'failure', 'xid', @schema@.ddl_xid(), 'tag', tag, 'event', event, 'sqlstate', state,
        'error', left(error, 1000));
END
$cdcpipe$;

-- The parts of the current command that concern tables, types, schemas and publications. Each row has one or two of the last four
-- columns.
CREATE OR REPLACE FUNCTION @schema@.ddl_commands(
    OUT place bigint, OUT tag text, OUT object_type text, OUT oid oid, OUT identity text, OUT in_extension boolean,
    OUT relation oid, OUT type oid, OUT namespace oid, OUT publication oid)
RETURNS SETOF record
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET jit = off SET quote_all_identifiers = off
AS $cdcpipe$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT d.place, d.command_tag, d.object_type, d.objid, d.object_identity, d.in_extension,
        d.relation, d.type, d.namespace, d.publication
    FROM (
        SELECT e.place, e.command_tag, e.object_type, e.objid, e.object_identity, e.in_extension,
            CASE e.classid
                WHEN 'pg_class'::regclass THEN (
                    SELECT t.oid FROM pg_class t WHERE t.relkind IN ('r', 'p') AND t.relpersistence <> 't' AND t.oid = coalesce(
                        -- Only a unique index can be a key.
                        (SELECT i.indrelid FROM pg_index i
                            WHERE i.indexrelid = e.objid AND i.indisunique AND e.command_tag <> 'COMMENT'),
                        e.objid))
                -- A renamed constraint renames its index.
                WHEN 'pg_constraint'::regclass THEN (
                    SELECT t.oid FROM pg_constraint k JOIN pg_class t ON t.oid = k.conrelid
                    WHERE k.oid = e.objid AND k.contype IN ('p', 'u') AND t.relpersistence <> 't' AND e.command_tag <> 'COMMENT')
                WHEN 'pg_publication_rel'::regclass THEN (SELECT r.prrelid FROM pg_publication_rel r WHERE r.oid = e.objid)
            END AS relation,
            CASE e.classid
                WHEN 'pg_type'::regclass THEN (
                    SELECT t.oid FROM pg_type t
                    WHERE t.oid = e.objid AND t.typnamespace <> pg_my_temp_schema() AND e.command_tag <> 'COMMENT')
                -- ALTER TYPE ... ADD ATTRIBUTE
                WHEN 'pg_class'::regclass THEN (
                    SELECT t.reltype FROM pg_class t WHERE t.oid = e.objid AND t.relkind = 'c' AND t.relpersistence <> 't')
            END AS type,
            CASE
                WHEN e.object_type = 'schema' AND e.command_tag <> 'COMMENT' THEN e.objid
                WHEN e.object_type = 'publication namespace' THEN (
                    SELECT n.oid FROM pg_namespace n
                    WHERE n.nspname = (pg_identify_object_as_address(e.classid, e.objid, e.objsubid)).object_names[1])
            END AS namespace,
            -- The parts of a publication are in catalogs that not every version has, but each has the publication's name.
            CASE
                WHEN e.object_type = 'publication' AND e.command_tag <> 'COMMENT' THEN e.objid
                WHEN e.object_type LIKE 'publication %' THEN (
                    SELECT p.oid FROM pg_publication p
                    WHERE p.pubname = (pg_identify_object_as_address(e.classid, e.objid, e.objsubid)).object_args[1])
            END AS publication
        FROM (SELECT c.*, c.ordinality AS place FROM pg_event_trigger_ddl_commands() WITH ORDINALITY c) e
    ) d
    WHERE coalesce(d.relation, d.type, d.namespace, d.publication) IS NOT NULL;
END
$cdcpipe$;

-- After a command: what it did to which tables, and the tables as they are now.
CREATE OR REPLACE FUNCTION @schema@.ddl_command_end() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET jit = off
AS $cdcpipe$
DECLARE
    relations oid[];
    types oid[];
    schemas oid[];
    publications oid[];
    objects json;
    described json;
    message json;
BEGIN
    BEGIN
        SELECT array_agg(DISTINCT t.relation) FILTER (WHERE t.relation IS NOT NULL),
            array_agg(DISTINCT t.type) FILTER (WHERE t.type IS NOT NULL),
            array_agg(DISTINCT t.namespace) FILTER (WHERE t.namespace IS NOT NULL),
            array_agg(DISTINCT t.publication) FILTER (WHERE t.publication IS NOT NULL),
            coalesce(json_agg(json_build_object(
                'tag', t.tag, 'type', t.object_type, 'oid', t.oid::bigint, 'identity', t.identity,
                'in_extension', t.in_extension) ORDER BY t.place), '[]')
        INTO relations, types, schemas, publications, objects
        FROM @schema@.ddl_commands() t;

        IF relations IS NOT NULL OR types IS NOT NULL OR schemas IS NOT NULL OR publications IS NOT NULL
            OR tg_tag = 'ALTER PUBLICATION'
        THEN
            -- A renamed schema renames its tables. A schema in a publication publishes its tables.
            IF tg_tag IN ('ALTER SCHEMA', 'ALTER PUBLICATION') THEN
                relations := relations || ARRAY(SELECT c.oid FROM pg_class c WHERE c.relnamespace = ANY (schemas));
            END IF;
            described := @schema@.ddl_publications(publications);
            -- A command that makes a publication with tables or schemas lists the publication only.
            IF tg_tag = 'CREATE PUBLICATION' THEN
                relations := relations
                    || ARRAY(SELECT r.prrelid FROM pg_publication_rel r WHERE r.prpubid = ANY (publications))
                    || ARRAY(
                        SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                        WHERE n.nspname IN (SELECT json_array_elements_text(p -> 'schemas') FROM json_array_elements(described) p));
            END IF;
            -- An attribute of a composite type is a column of each table that was made OF it.
            IF types IS NOT NULL THEN
                relations := relations || ARRAY(SELECT c.oid FROM pg_class c WHERE c.reloftype = ANY (types));
            END IF;
            relations := @schema@.ddl_family(relations);
            -- A detached partition is in no list. It is a table that this transaction has changed. (A few others may be found, too.)
            IF tg_tag = 'ALTER TABLE' AND EXISTS (SELECT FROM pg_class c WHERE c.oid = ANY (relations) AND c.relkind = 'p') THEN
                relations := relations || ARRAY(
                    SELECT c.oid FROM pg_class c
                    WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
                    AND age(c.xmin) <= 0);
            END IF;
            message := json_build_object(
                'version', 1,
                'kind', 'command',
                'xid', @schema@.ddl_xid(),
                'tag', tg_tag,
                'statement', @schema@.ddl_statement(),
                'objects', objects,
                'tables', @schema@.ddl_tables(relations),
                'types', @schema@.ddl_types(types),
                'schemas', (
                    SELECT coalesce(json_agg(json_build_object('oid', n.oid::bigint, 'name', n.nspname) ORDER BY n.oid), '[]')
                    FROM pg_namespace n WHERE n.oid = ANY (schemas)),
                'publications', described);
        END IF;
    EXCEPTION WHEN OTHERS THEN
        IF (@schema@.ddl_settings() ->> 'strict')::boolean THEN
            RAISE;
        END IF;
        message := @schema@.ddl_failure(tg_event, tg_tag, SQLSTATE, SQLERRM);
    END;
    IF message IS NOT NULL THEN
        PERFORM @schema@.ddl_write(message::text);
    END IF;
END
$cdcpipe$;

-- Before a command ends: what it dropped. A statement DROP ... has only this message. For an ALTER TABLE it is a part, and the command's
-- own message follows.
CREATE OR REPLACE FUNCTION @schema@.ddl_sql_drop() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET jit = off
AS $cdcpipe$
DECLARE
    dropped json;
    relations oid[];
    publications oid[];
    has_index boolean;
    message json;
BEGIN
    BEGIN
        SELECT json_agg(json_build_object(
                'type', d.object_type,
                'oid', coalesce(a.attrelid, d.objid)::bigint,
                'number', coalesce(a.attnum, nullif(d.objsubid, 0)),
                'schema', CASE WHEN cardinality(d.address_names) > 1 THEN d.address_names[1] ELSE d.schema_name END,
                'name', CASE WHEN d.is_of_column THEN d.address_names[2]
                    ELSE coalesce(d.object_name, d.address_names[cardinality(d.address_names)]) END,
                'column', CASE WHEN d.is_of_column THEN d.address_names[3] END,
                'publication', CASE WHEN d.object_type LIKE 'publication %' THEN d.address_args[1] END,
                'identity', d.object_identity,
                'is_named', d.original) ORDER BY d.place),
            -- What has lost a column, or the default of one.
            array_agg(DISTINCT coalesce(a.attrelid, d.objid)) FILTER (WHERE d.is_of_column),
            array_agg(DISTINCT p.oid) FILTER (WHERE p.oid IS NOT NULL),
            bool_or(d.object_type = 'index')
        INTO dropped, relations, publications, has_index
        FROM (
            SELECT o.*, o.ordinality AS place, o.object_type IN ('table column', 'default value') AS is_of_column
            FROM pg_event_trigger_dropped_objects() WITH ORDINALITY o) d
        LEFT JOIN pg_publication p ON d.object_type LIKE 'publication %' AND p.pubname = d.address_args[1]
        LEFT JOIN pg_attribute a ON d.object_type = 'default value' AND a.attname = d.address_names[3]
            AND a.attrelid = to_regclass(CASE WHEN d.is_of_column THEN format('%I.%I', d.address_names[1], d.address_names[2]) END)
        WHERE NOT d.is_temporary AND (
            d.object_type IN ('table', 'table column')
            -- Not the row type, the indexes and the publications of a dropped table.
            OR (d.original OR d.normal) AND d.object_type IN (
                'type', 'composite type', 'index', 'schema', 'publication', 'publication relation', 'publication namespace')
            -- The default that needed a dropped function or type.
            OR d.normal AND d.object_type = 'default value');

        IF dropped IS NOT NULL THEN
            -- Nothing tells which table a dropped index was on. It is a table that this transaction has locked against everybody.
            IF has_index THEN
                relations := relations || ARRAY(
                    SELECT l.relation FROM pg_locks l
                    WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND l.database = (
                        SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                    AND l.mode IN ('AccessExclusiveLock', 'ShareUpdateExclusiveLock'));
            END IF;
            message := json_build_object(
                'version', 1,
                'kind', 'drop',
                'xid', @schema@.ddl_xid(),
                'tag', tg_tag,
                'statement', @schema@.ddl_statement(),
                'dropped', dropped,
                'tables', @schema@.ddl_tables(relations),
                'publications', @schema@.ddl_publications(publications));
        END IF;
    EXCEPTION WHEN OTHERS THEN
        IF (@schema@.ddl_settings() ->> 'strict')::boolean THEN
            RAISE;
        END IF;
        message := @schema@.ddl_failure(tg_event, tg_tag, SQLSTATE, SQLERRM);
    END;
    IF message IS NOT NULL THEN
        PERFORM @schema@.ddl_write(message::text);
    END IF;
END
$cdcpipe$;

-- Before a command writes a table's rows anew: the stream will not have these rows. The command's own message follows.
CREATE OR REPLACE FUNCTION @schema@.ddl_table_rewrite() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET jit = off
AS $cdcpipe$
DECLARE
    reasons integer := pg_event_trigger_table_rewrite_reason();
    message json;
BEGIN
    BEGIN
        SELECT json_build_object(
            'version', 1,
            'kind', 'rewrite',
            'xid', @schema@.ddl_xid(),
            'tag', tg_tag,
            'statement', @schema@.ddl_statement(),
            'rewritten', json_build_object(
                'oid', c.oid::bigint, 'schema', n.nspname, 'name', c.relname,
                'reasons', array_remove(ARRAY[
                    CASE WHEN reasons & 1 > 0 THEN 'persistence' END, CASE WHEN reasons & 2 > 0 THEN 'default' END,
                    CASE WHEN reasons & 4 > 0 THEN 'type' END, CASE WHEN reasons & 8 > 0 THEN 'access method' END], NULL)))
        INTO message
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = pg_event_trigger_table_rewrite_oid() AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't';
    EXCEPTION WHEN OTHERS THEN
        IF (@schema@.ddl_settings() ->> 'strict')::boolean THEN
            RAISE;
        END IF;
        message := @schema@.ddl_failure(tg_event, tg_tag, SQLSTATE, SQLERRM);
    END;
    IF message IS NOT NULL THEN
        PERFORM @schema@.ddl_write(message::text);
    END IF;
END
$cdcpipe$;

-- Tell the stream's reader that from here on there are messages (or, with the kind "removed", none), and how these tables are now.
CREATE OR REPLACE FUNCTION @schema@.ddl_announce(kind text, relations oid[], publications text[]) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $cdcpipe$
BEGIN
    PERFORM @schema@.ddl_write(json_build_object(
        'version', 1,
        'kind', kind,
        'xid', @schema@.ddl_xid(),
        'settings', @schema@.ddl_settings(),
        'tables', @schema@.ddl_tables(relations),
        'publications', @schema@.ddl_publications(ARRAY(
            SELECT p.oid FROM pg_publication p WHERE p.pubname = ANY (ddl_announce.publications)))
    )::text);
END
$cdcpipe$;

-- Each function of this file by its name, and no other one: the schema may have been there, with functions that others call.
REVOKE ALL ON FUNCTION
    @schema@.ddl_settings(), @schema@.ddl_type(oid, integer), @schema@.ddl_tables(oid[]), @schema@.ddl_family(oid[]),
    @schema@.ddl_types(oid[]), @schema@.ddl_publications(oid[]), @schema@.ddl_statement(), @schema@.ddl_xid(),
    @schema@.ddl_write(text), @schema@.ddl_failure(text, text, text, text), @schema@.ddl_commands(),
    @schema@.ddl_command_end(), @schema@.ddl_sql_drop(), @schema@.ddl_table_rewrite(),
    @schema@.ddl_announce(text, oid[], text[])
FROM PUBLIC;

-- The triggers fire for these commands only. Drops come from many commands (DROP FUNCTION ... CASCADE), so they have no list.
-- ALWAYS: with session_replication_role = replica, too, because the rows that such a session changes are in the stream, too.
DROP EVENT TRIGGER IF EXISTS cdcpipe_ddl_command_end;
CREATE EVENT TRIGGER cdcpipe_ddl_command_end ON ddl_command_end
WHEN TAG IN (
    'CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO', 'ALTER TABLE',
    'CREATE INDEX', 'ALTER INDEX',
    'CREATE SCHEMA', 'ALTER SCHEMA',
    'CREATE TYPE', 'ALTER TYPE', 'CREATE DOMAIN', 'ALTER DOMAIN',
    'CREATE PUBLICATION', 'ALTER PUBLICATION',
    'COMMENT')
EXECUTE FUNCTION @schema@.ddl_command_end();
ALTER EVENT TRIGGER cdcpipe_ddl_command_end ENABLE ALWAYS;

DROP EVENT TRIGGER IF EXISTS cdcpipe_sql_drop;
CREATE EVENT TRIGGER cdcpipe_sql_drop ON sql_drop EXECUTE FUNCTION @schema@.ddl_sql_drop();
ALTER EVENT TRIGGER cdcpipe_sql_drop ENABLE ALWAYS;

DROP EVENT TRIGGER IF EXISTS cdcpipe_table_rewrite;
CREATE EVENT TRIGGER cdcpipe_table_rewrite ON table_rewrite EXECUTE FUNCTION @schema@.ddl_table_rewrite();
ALTER EVENT TRIGGER cdcpipe_table_rewrite ENABLE ALWAYS;
