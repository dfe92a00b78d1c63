"""A network with random faults, for scripts/soak: it goes silent, breaks connections, is slow or late, and recovers.

The kind of weather (`soak_options.NETWORK_KINDS`) is one fault all the time (`delay`, `resets`), one fault again and again
(`silence`), or everything.

    with FaultyProxy(cluster.port) as proxy, Weather(proxy, seed, print):
        ...                      # connections through the proxy must survive this
    # at the end nothing is held back any more

The seed decides the sequence of faults. Which connections they hit depends on timing.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Self

from faulty_proxy import CANCEL, CONNECT, END_OF_COPY, FaultyProxy, Link

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Weather"]

DELAY_S = 0.05
RESET_SHARE = 0.01
"""What `delay` does in each direction, and `resets` to each piece (faulty_proxy.PIECE_BYTES)."""

_PHASES = (CONNECT, CANCEL, END_OF_COPY, "SET", "SELECT", "IDENTIFY_SYSTEM", "START_REPLICATION", "CREATE_REPLICATION_SLOT")


class Weather(threading.Thread):
    """Makes the faults of ``kind`` in ``proxy`` until the context ends. ``faults`` counts them."""

    def __init__(self, proxy: FaultyProxy, seed: int, say: Callable[[str], None], kind: str = "mixed") -> None:
        super().__init__(name="weather", daemon=True)
        self.faults = 0
        self._kind = kind
        self._seed = seed
        self._proxy = proxy
        self._rng = random.Random(seed)
        self._say = say
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        try:
            if self._kind in ("delay", "resets"):
                self._be_steady()
            else:
                self._change()
        finally:
            self._calm()

    def _be_steady(self) -> None:
        if self._kind == "delay":
            self._proxy.delay(DELAY_S)
        else:
            self._proxy.reset_at_random(RESET_SHARE, self._seed)
        self._say(f"network: {self._kind}, all the time")
        self._is_over.wait()
        self.faults = len(self._proxy.random_resets)

    def _change(self) -> None:
        kinds = (self._silence, self._silence, self._reset, self._throttle, self._delay, self._fault_at_a_phase)
        while not self._is_over.wait(self._rng.uniform(0.5, 6.0)):
            self._rng.choice(kinds if self._kind == "mixed" else (self._silence,))()
            self.faults += 1

    def _calm(self) -> None:
        self._proxy.throttle(None)
        self._proxy.delay(0.0)
        self._proxy.reset_at_random(0, self._seed)
        self._proxy.resume()

    def _silence(self) -> None:
        """Let nothing pass for a while. Then release what was held back, or break the connections."""
        duration_s = self._rng.choice([0.5, 2.0, 8.0, 25.0])
        is_broken = self._rng.random() < 0.5
        self._say(f"network: silent for {duration_s:g} s{', then broken off' if is_broken else ''}")
        self._proxy.silence()
        self._is_over.wait(duration_s)
        if is_broken:
            self._proxy.reset()
        self._proxy.resume()

    def _reset(self) -> None:
        self._say("network: broken off")
        self._proxy.reset()

    def _throttle(self) -> None:
        bytes_per_s = self._rng.choice([2_000, 50_000, 1_000_000])
        self._say(f"network: {bytes_per_s:,} bytes a second")
        self._proxy.throttle(bytes_per_s)
        self._is_over.wait(self._rng.choice([1.0, 5.0, 15.0]))
        self._proxy.throttle(None)

    def _delay(self) -> None:
        delay_s = self._rng.choice([0.02, 0.2, 2.0])
        self._say(f"network: late by {delay_s:g} s")
        self._proxy.delay(delay_s)
        self._is_over.wait(self._rng.choice([1.0, 5.0, 15.0]))
        self._proxy.delay(0.0)

    def _fault_at_a_phase(self) -> None:
        """Silence one connection, or break it, when it reaches a certain phase of the protocol."""
        phase = self._rng.choice(_PHASES)
        fault = self._rng.choice([Link.silence, Link.reset])
        self._say(f"network: the next connection at {phase!r}: {fault.__name__}")
        reached = self._proxy.at(phase, fault)
        self._is_over.wait(5.0)
        if reached.is_set() and fault is Link.silence:
            self._is_over.wait(self._rng.choice([2.0, 25.0]))
            self._proxy.resume()
