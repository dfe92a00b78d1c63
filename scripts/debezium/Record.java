import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.io.Reader;
import java.io.Writer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;

/**
 * Runs Debezium's embedded engine for each *.properties file named, until a logical message with the prefix "end", and
 * writes the events' values, a line each, beside it with the suffix .jsonl. Started by scripts/record-debezium.
 *
 * Arguments: host, port, database, directory for the events, files.
 */
public class Record {
    public static void main(String[] args) throws Exception {
        var done = new CountDownLatch(args.length - 4);
        var failed = new boolean[1];
        for (int i = 4; i < args.length; i++) {
            var file = Path.of(args[i]);
            var name = file.getFileName().toString().replace(".properties", "");
            var props = new Properties();
            try (Reader reader = Files.newBufferedReader(file)) {
                props.load(reader);
            }
            // Engines of one prefix fight over the name of their metrics, for a minute.
            props.putIfAbsent("topic.prefix", name);
            props.setProperty("name", name);
            props.setProperty("connector.class", "io.debezium.connector.postgresql.PostgresConnector");
            props.setProperty("offset.storage", "org.apache.kafka.connect.storage.MemoryOffsetBackingStore");
            props.setProperty("database.hostname", args[0]);
            props.setProperty("database.port", args[1]);
            props.setProperty("database.user", "postgres");
            props.setProperty("database.password", "");
            props.setProperty("database.dbname", args[2]);
            props.setProperty("plugin.name", "pgoutput");
            props.setProperty("publication.name", "p");
            props.setProperty("publication.autocreate.mode", "disabled");
            props.setProperty("slot.name", "debezium_" + name);
            props.setProperty("snapshot.mode", "no_data");
            props.setProperty("tombstones.on.delete", "false");
            props.setProperty("converter.schemas.enable", "false");
            // Without it truncates are skipped.
            props.putIfAbsent("skipped.operations", "none");
            Writer writer = Files.newBufferedWriter(Path.of(args[3], name + ".jsonl"));
            var ended = new boolean[1];
            var engine = DebeziumEngine.create(Json.class)
                .using(props)
                .using((success, message, error) -> {
                    if (!ended[0]) {
                        System.err.println(name + ": " + message);
                        if (error != null) {
                            error.printStackTrace();
                        }
                        failed[0] = true;
                    }
                    done.countDown();
                })
                .notifying((ChangeEvent<String, String> event) -> {
                    try {
                        if (event.value() == null || ended[0]) {
                            return;
                        }
                        if (event.value().contains("\"prefix\":\"end\"")) {
                            ended[0] = true;
                            writer.close();
                            done.countDown();
                            return;
                        }
                        writer.write(event.value());
                        writer.write("\n");
                    } catch (java.io.IOException ex) {
                        throw new java.io.UncheckedIOException(ex);
                    }
                })
                .build();
            var thread = new Thread(engine);
            thread.setDaemon(true);
            thread.start();
        }
        done.await();
        // The engines' own way out would wait for their threads.
        Runtime.getRuntime().halt(failed[0] ? 1 : 0);
    }
}
