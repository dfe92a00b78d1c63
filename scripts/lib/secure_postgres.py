"""A throwaway PostgreSQL 15 with TLS that asks for a password over TCP. (The others' binaries are built without TLS.)"""

from pathlib import Path
from typing import Any

from postgres import Cluster, run_as

__all__ = ["PASSWORD", "SecureCluster"]

PASSWORD = "of the test servers"
"""The password of the user `postgres`. It protects nothing."""


class SecureCluster(Cluster):
    """A `Cluster` with a certificate of its own. Over the Unix socket it trusts everybody, as the others do."""

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        super().__init__("15", settings=settings)
        self._key = self.directory / "server.key"
        self.settings |= {"ssl": "on", "ssl_cert_file": str(self.certificate), "ssl_key_file": str(self._key)}

    @property
    def certificate(self) -> Path:
        """The server's certificate for 127.0.0.1, which it has signed itself."""
        return self.directory / "server.crt"

    def _initdb_options(self) -> list[str]:
        # Debian's PostgreSQL brings the program openssl along.
        names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
        run_as(
            self, "openssl", "req", "-x509", *names, "-newkey", "rsa:2048", "-nodes", "-keyout", self._key, "-out", self.certificate
        )
        password = self.directory / "password"
        password.write_text(PASSWORD)
        return ["--auth-host=scram-sha-256", f"--pwfile={password}"]
