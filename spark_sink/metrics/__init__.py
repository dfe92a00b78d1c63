"""The metrics of ``land`` and ``run``: what each stage counts, as data for cdcpipe/exposition.py."""
