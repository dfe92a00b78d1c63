"""How far each stage is. Needs no Spark."""
