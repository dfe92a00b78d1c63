"""The lag of a position, from the WAL positions that a monitor has seen."""

from spark_sink.client.slot_monitor import Lag, WALHistory


def test_lag_is_measured_on_the_history_of_the_wal() -> None:
    history = WALHistory()
    assert history.lag(5, 1.0) == (0, 0.0, False)
    for lsn, now in ((100, 1.0), (100, 2.0), (200, 3.0), (300, 4.0)):
        history.add(lsn, now)
    assert history.lag(300, 9.0) == Lag(0, 0.0)
    assert history.lag(250, 9.0) == Lag(50, 5.0)
    assert history.lag(100, 9.0) == Lag(200, 6.0)
    assert history.lag(50, 9.0) == Lag(250, 8.0, at_least=True)
    for number in range(20_000):
        history.add(400 + number, 10.0 + number)
    behind = history.lag(100, 20_010.0)
    assert behind.bytes == 20_299
    assert behind.seconds == 20_007.0
    assert 10_000 <= history.lag(10_400, 20_010.0).seconds < 20_007


def test_a_server_that_has_gone_back_begins_the_history_anew() -> None:
    history = WALHistory()
    for lsn, now in ((100, 1.0), (300, 2.0), (200, 50.0), (220, 60.0)):
        history.add(lsn, now)
    assert history.lag(210, 61.0) == Lag(10, 1.0)
    assert history.lag(150, 61.0) == Lag(70, 11.0, at_least=True)


def test_a_lag_does_not_begin_at_0_after_reports_were_missing() -> None:
    """The network was cut, or the program was stopped (docker pause), while applications wrote on."""
    history = WALHistory()
    for lsn, now in ((100, 1.0), (100, 99.0), (900, 2500.0), (950, 2501.0)):
        history.add(lsn, now)
    assert history.lag(100, 2501.0) == Lag(850, 2402.0)
    assert history.lag(900, 2502.0) == Lag(50, 1.0)
