"""From a changelog to a table's current rows, or to its rows as they were."""
