"""Errors that stand for those of Spark, for tests that import no Spark."""

__all__ = ["Py4JError"]


class Py4JError(Exception):
    """Stands for the class of this name, which every error of Java has, or a subclass of it."""

    __module__ = "py4j.protocol"
