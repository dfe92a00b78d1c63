"""Positions without a server: which ones are confirmed, and when."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdcpipe.replication.progress import MAX_UNCONFIRMED, MIN_REPLY_INTERVAL_S, NEVER, UNREAD_INTERVAL_S, Progress
from cdcpipe.replication.strict_progress import StrictProgress


def received(progress: Progress, *ends: int) -> None:
    for end in ends:
        progress.begin()
        progress.end(end)
    progress.written(ends)


@pytest.mark.parametrize(
    ("feedback", "confirmed"),
    [(0, 0), (99, 0), (100, 100), (150, 100), (199, 100), (200, 200), (300, 300), (301, 300), (1 << 40, 300)],
)
def test_feedback_is_cut_down_to_a_transaction_end(feedback: int, confirmed: int) -> None:
    progress = Progress(0)
    received(progress, 100, 200, 300)
    progress.feedback(feedback, 0)
    assert progress.confirmed_lsn == confirmed


def test_feedback_from_the_future_confirms_nothing_that_comes_later() -> None:
    progress = Progress(0)
    progress.feedback(1 << 60, 0)
    received(progress, 100)
    assert progress.confirmed_lsn == 0
    assert progress.is_outstanding


def test_unwritten_records_can_not_be_confirmed() -> None:
    progress = Progress(0)
    progress.begin()
    progress.end(100)
    progress.feedback(100, 0)
    assert progress.confirmed_lsn == 0


def test_a_keepalive_is_confirmed_only_with_nothing_outstanding() -> None:
    progress = Progress(0)
    progress.keepalive(50, reply_requested=False)
    assert progress.confirmed_lsn == 50
    progress.begin()
    progress.keepalive(60, reply_requested=False)
    progress.end(100)
    progress.written([100])
    progress.keepalive(120, reply_requested=False)
    assert progress.confirmed_lsn == 50
    progress.feedback(100, 0)
    assert progress.confirmed_lsn == 120  # everything before 120 was sent before the keepalive, and confirmed


def test_a_keepalive_before_new_records_does_not_count_any_more() -> None:
    progress = Progress(0)
    received(progress, 100)
    progress.keepalive(150, reply_requested=False)
    received(progress, 200)
    progress.feedback(100, 0)
    assert progress.confirmed_lsn == 100


def test_a_message_outside_of_transactions_is_outstanding_until_confirmed() -> None:
    progress = Progress(0)
    progress.message(70)
    progress.keepalive(80, reply_requested=False)
    assert progress.confirmed_lsn == 0
    progress.written([70])
    progress.feedback(69, 0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0, True)
    progress.feedback(70, 0)
    assert progress.confirmed_lsn == 80


def test_messages_outside_of_transactions_are_confirmed_as_they_come() -> None:
    """Also while a streamed transaction is open, and without a commit or a keepalive after them."""
    progress = Progress(0)
    progress.begin(7)
    for lsn in (70, 80, 90):
        progress.message(lsn)
    progress.written([70, 80, 90])
    progress.feedback(85, 0)
    assert progress.confirmed_lsn == 80
    progress.confirm_written(0)
    assert progress.confirmed_lsn == 90


def test_open_streamed_transactions_hold_keepalives_back() -> None:
    progress = Progress(0)
    progress.begin(7)
    progress.begin(8)
    progress.end(100, 7)
    progress.written([100])
    progress.feedback(100, 0)
    progress.keepalive(500, reply_requested=False)
    assert progress.confirmed_lsn == 100
    progress.abort(8)
    progress.keepalive(600, reply_requested=False)
    assert progress.confirmed_lsn == 600


def test_a_server_that_asks_gets_no_opinion_while_something_is_outstanding() -> None:
    progress = Progress(0)
    received(progress, 100, 200)
    progress.feedback(100, 0)
    assert progress.status(0).flush_lsn == 100
    progress.keepalive(300, reply_requested=True)
    assert progress.status(1) == (300, 0, False)
    assert progress.status(2).flush_lsn == 100


def test_a_server_that_asks_after_the_end_position_gets_no_opinion() -> None:
    """Its position is not confirmed: the records before it were not read."""
    progress = Progress(0)
    received(progress, 100)
    progress.keepalive(300, reply_requested=True, is_past_end=True)
    progress.feedback(100, 0)
    assert progress.status(1).flush_lsn == 100
    assert progress.status(2) == (300, 0, False)
    assert progress.confirmed_lsn == 100


def test_new_feedback_goes_before_an_answer_without_an_opinion() -> None:
    """A server that shuts down asks without a pause. The last update before the end of a stream has the last feedback even so."""
    progress = Progress(0, status_interval_s=0)
    received(progress, 100, 200)
    progress.keepalive(300, reply_requested=True)
    progress.feedback(100, 0)
    assert progress.status(0) == (300, 100, False)
    assert progress.due_at() == MIN_REPLY_INTERVAL_S
    assert progress.status(1) == (300, 0, False)
    assert progress.due_at() == NEVER


def test_answers_are_rate_limited_and_none_is_dropped() -> None:
    progress = Progress(0, status_interval_s=0)
    progress.status(10)
    progress.keepalive(1, reply_requested=True)
    assert progress.due_at() == 10 + MIN_REPLY_INTERVAL_S


def test_feedback_waits_no_longer_than_its_interval() -> None:
    progress = Progress(0, feedback_interval_s=3, status_interval_s=10)
    received(progress, 100, 200)
    assert progress.due_at() == 10
    progress.feedback(100, 1)
    progress.feedback(200, 2)
    assert progress.due_at() == 4


def test_silence_is_asked_about_and_then_given_up() -> None:
    progress = Progress(0, status_interval_s=0, silence_limit_s=10)
    assert progress.due_at() == 5
    assert progress.status(5).reply_requested
    assert progress.due_at() == 10
    assert not progress.is_lost(9.9)
    assert progress.is_lost(10)
    progress.heard(9.9)
    assert not progress.is_lost(10)


def test_silence_counts_only_after_a_question() -> None:
    """A process that was stopped for longer than the limit asks first."""
    progress = Progress(0, status_interval_s=0, silence_limit_s=10)
    assert not progress.is_lost(60)
    assert progress.status(60).reply_requested
    assert progress.due_at() == 65
    progress.status(63)
    assert not progress.is_lost(64.9)
    assert progress.is_lost(65)
    progress.heard(66)
    assert not progress.is_lost(70)
    assert progress.due_at() == 71


def test_nobody_asks_while_nobody_reads() -> None:
    """The answers would wait at the server, which would fill its memory: one more for each update."""
    progress = Progress(0, status_interval_s=0, silence_limit_s=10)
    progress.heard(1)
    progress.is_read = False
    for now in (20, 21, 22):
        assert not progress.status(now).reply_requested
        assert progress.due_at() == now + UNREAD_INTERVAL_S
    progress.is_read = True
    assert progress.status(23).reply_requested
    assert not progress.is_lost(24)


def test_a_server_whose_questions_are_not_read_is_answered_unasked() -> None:
    progress = Progress(0, status_interval_s=0)
    assert progress.due_at() == NEVER
    progress.is_read = False
    assert progress.due_at() == UNREAD_INTERVAL_S
    progress.status(5)
    assert progress.due_at() == 5 + UNREAD_INTERVAL_S
    progress.is_read = True
    assert progress.due_at() == NEVER


def test_memory_is_bounded_without_confirmations() -> None:
    progress = Progress(0)
    count = MAX_UNCONFIRMED + 10
    progress.written(range(10, 10 * count + 1, 10))
    progress.written([10 * count + 10])
    assert len(progress._unconfirmed) < MAX_UNCONFIRMED
    progress.feedback(10 * count + 10, 0)
    assert progress.confirmed_lsn == 10 * count + 10


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("transaction"), st.integers(1, 50), st.booleans()),
        st.tuples(st.just("keepalive"), st.integers(0, 50), st.booleans()),
        st.tuples(st.just("feedback"), st.integers(0, 3000), st.booleans()),
        st.tuples(st.just("status"), st.just(0), st.just(False)),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_confirmed_position_is_never_wrong(steps: list[tuple[str, int, bool]]) -> None:
    """It never goes back, never passes an unconfirmed transaction, and is always an end or the position of a keepalive."""
    progress = Progress(0)
    position, highest, ends, allowed, unconfirmed, last = 0, 0, [], {0}, set(), 0
    for now, (kind, number, flag) in enumerate(steps):
        if kind == "transaction":
            position += number
            progress.begin()
            progress.end(position)
            progress.written([position])
            ends.append(position)
            unconfirmed.add(position)
            allowed.add(position)
        elif kind == "keepalive":
            position += number
            progress.keepalive(position, reply_requested=flag)
            allowed.add(position)
        elif kind == "feedback":
            progress.feedback(number, now)
            highest = max(highest, number)
            unconfirmed = {end for end in unconfirmed if end > number}
        else:
            status = progress.status(now)
            assert status.flush_lsn in (0, progress.confirmed_lsn)
            assert status.write_lsn >= status.flush_lsn
        assert progress.confirmed_lsn >= last
        assert progress.confirmed_lsn in allowed
        assert all(progress.confirmed_lsn < end for end in unconfirmed)
        last = progress.confirmed_lsn


# Prepared transactions that are held back


def test_feedback_waits_for_a_prepared_transaction_that_is_held_back() -> None:
    progress = Progress(0)
    progress.begin()
    progress.prepare(7, 50)
    progress.end(40)
    progress.end(100)
    progress.written([40, 100])
    progress.feedback(100, 1)
    assert progress.confirmed_lsn == 40
    progress.keepalive(150, reply_requested=False)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (40, True)
    progress.commit_prepared(7, 200)
    progress.end(200, 7)
    progress.feedback(0xFFFFFFFF, 2)  # its commit is not written yet
    assert progress.confirmed_lsn == 40
    progress.written([200])
    progress.feedback(199, 3)
    assert progress.confirmed_lsn == 40
    progress.feedback(200, 4)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (200, False)


def test_feedback_that_waited_is_sent_when_the_prepared_transaction_is_rolled_back() -> None:
    progress = Progress(0, feedback_interval_s=10)
    progress.prepare(7, 50)
    progress.end(100)
    progress.end(300)
    progress.written([100])
    progress.feedback(0xFFFFFFFF, 1)
    progress.written([300])
    progress.forget_prepared(7)
    assert progress.confirmed_lsn == 100
    assert progress.due_at() == 0


def test_a_position_is_confirmed_behind_every_prepare_whose_commit_is_not() -> None:
    progress = Progress(0)
    progress.prepare(7, 10)
    progress.end(30)
    progress.prepare(8, 40)
    progress.commit_prepared(7, 60)
    progress.end(60, 7)
    progress.written([30, 60])
    progress.feedback(60, 1)
    assert progress.confirmed_lsn == 0  # 30 and 40 lie between the PREPARE at 10 and its commit, 60 behind the PREPARE at 40
    progress.commit_prepared(8, 80)
    progress.end(80, 8)
    progress.written([80])
    progress.feedback(80, 2)
    assert progress.confirmed_lsn == 80


def test_the_commit_of_an_empty_prepared_transaction_is_passed_too() -> None:
    """It has no output. But to a stream that begins before it, the server would send only its COMMIT PREPARED."""
    progress = Progress(0)
    progress.prepare(7, 10)
    progress.end(30)
    progress.commit_prepared(7, 60)
    progress.written([30])
    progress.feedback(30, 1)
    assert progress.confirmed_lsn == 0
    progress.keepalive(70, reply_requested=False)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (70, False)


# Idle positions that the consumer confirms


def test_an_idle_position_is_confirmed_only_by_the_consumer() -> None:
    progress = StrictProgress(0)
    progress.keepalive(50, reply_requested=False)
    assert progress.take_idle(0) == 50
    progress.written([50])
    progress.keepalive(60, reply_requested=False)
    progress.feedback(49, 0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0, True)
    progress.feedback(55, 0)
    assert (progress.confirmed_lsn, progress.due_at()) == (50, 0)


def test_an_idle_position_that_is_not_written_yet_can_not_be_confirmed() -> None:
    progress = StrictProgress(0)
    progress.keepalive(50, reply_requested=False)
    assert progress.take_idle(0) == 50
    progress.feedback(50, 0)
    assert progress.confirmed_lsn == 0


def test_an_idle_position_is_told_once_and_not_more_often_than_the_interval() -> None:
    progress = StrictProgress(0, status_interval_s=5)
    progress.keepalive(50, reply_requested=False)
    assert progress.take_idle(1) == 50
    progress.written([50])
    progress.feedback(50, 1)
    progress.keepalive(50, reply_requested=False)
    assert progress.take_idle(100) == 0
    progress.keepalive(60, reply_requested=False)
    progress.status(4)
    assert progress.take_idle(5.9) == 0
    assert progress.due_at() == 6
    assert progress.take_idle(6) == 60
    assert progress.due_at() == 9  # the next status update


def test_without_status_updates_idle_positions_are_told_each_second() -> None:
    progress = StrictProgress(0, status_interval_s=0)
    for now, lsn in ((10.0, 50), (10.5, 0), (11.0, 70)):
        progress.keepalive(60 + int(now == 11) * 10 - int(now == 10) * 10, reply_requested=False)
        assert progress.take_idle(now) == lsn
        progress.written([lsn])
        progress.feedback(lsn, now)


def test_nothing_is_told_while_something_is_outstanding() -> None:
    progress = StrictProgress(0, status_interval_s=0)
    progress.keepalive(50, reply_requested=False)
    progress.begin()
    assert progress.take_idle(0) == 0
    progress.end(100)
    progress.keepalive(110, reply_requested=False)
    progress.written([100])
    assert (progress.take_idle(1), progress.due_at()) == (0, NEVER)
    progress.feedback(100, 2)
    assert progress.confirmed_lsn == 100
    assert progress.take_idle(2) == 110


def test_at_the_end_an_idle_position_is_told_behind_what_is_outstanding() -> None:
    progress = StrictProgress(0)
    received(progress, 100)
    progress.keepalive(150, reply_requested=False)
    assert progress.take_idle(0, at_end=True) == 150
    assert progress.take_idle(0, at_end=True) == 0
    progress.written([150])
    progress.feedback(100, 0)
    assert progress.confirmed_lsn == 100
    progress.feedback(150, 0)
    assert progress.confirmed_lsn == 150


def test_no_idle_position_is_told_while_a_prepared_transaction_is_held_back() -> None:
    progress = StrictProgress(0)
    progress.prepare(7, 10)
    progress.keepalive(50, reply_requested=False)
    assert progress.take_idle(0, at_end=True) == 0
    progress.forget_prepared(7)
    progress.keepalive(60, reply_requested=False)
    assert progress.take_idle(0) == 60


@pytest.mark.parametrize("is_told", [False, True])
def test_a_server_that_shuts_down_gets_no_opinion_before_the_consumer_has_confirmed(is_told: bool) -> None:
    progress = StrictProgress(0)
    progress.keepalive(50, reply_requested=False)
    progress.take_idle(0)
    progress.written([50])
    progress.feedback(50, 0)
    assert progress.status(0).flush_lsn == 50
    progress.keepalive(60, reply_requested=True)
    if is_told:
        assert progress.take_idle(1) == 60
        progress.written([60])
    assert progress.status(1) == (60, 0, False)
    assert progress.status(2).flush_lsn == 50


def test_auto_feedback_confirms_idle_positions_that_are_written() -> None:
    progress = StrictProgress(0)
    progress.keepalive(50, reply_requested=False)
    progress.take_idle(0)
    progress.confirm_written(0)
    assert progress.confirmed_lsn == 0
    progress.written([50])
    progress.confirm_written(0)
    assert progress.confirmed_lsn == 50


class Server:
    """A slot's WAL, the part that is sent, and a consumer that confirms some of it. Prepared transactions are held back in between.

    With ``is_strict``, the consumer must also confirm idle positions.
    """

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self.now = 0.0
        self.wal: list[tuple[str, int, int, int]] = []
        """Kind, xid, where the record begins and ends: transaction, prepare, commit, empty (a commit without changes), rollback."""
        self.confirmed = 0
        self.prepared: list[int] = []
        self.queued: list[int] = []
        self.connect()

    def connect(self) -> None:
        self.progress = StrictProgress(self.now) if self.is_strict else Progress(self.now)
        self.queued.clear()
        self.sent = 0
        self.highest = 0
        needed = [record for record in self.wal if record[2] >= self.confirmed]
        prepares = {xid for kind, xid, _, _ in needed if kind == "prepare"}
        alone = [record for record in needed if record[0] in ("commit", "empty") and record[1] not in prepares]
        assert not alone, f"stuck: from {self.confirmed} on the server sends a COMMIT PREPARED without its PREPARE, {alone}"

    @property
    def end(self) -> int:
        return self.wal[-1][3] if self.wal else 0

    def add(self, kind: str, which: int) -> None:
        xid = len(self.wal) + 1
        if kind == "prepare":
            self.prepared.append(xid)
        elif kind != "transaction":
            if not self.prepared:
                return
            xid = self.prepared.pop(which % len(self.prepared))
        self.wal.append((kind, xid, self.end, self.end + 10))

    def send(self) -> None:
        records = [record for record in self.wal if record[2] >= self.confirmed and record[3] > self.sent]
        if not records:
            self.progress.keepalive(self.end, reply_requested=False)
            return
        kind, xid, start, self.sent = records[0]
        if kind == "transaction":
            self.progress.begin()
            self.progress.end(self.sent)
        elif kind == "prepare":
            self.progress.begin()
            self.progress.prepare(xid, start)
        elif kind == "rollback":
            self.progress.forget_prepared(xid)
        else:
            self.progress.commit_prepared(xid, self.sent)
            if kind == "commit":
                self.progress.end(self.sent, xid)
        if kind in ("transaction", "commit"):
            self.queued.append(self.sent)

    def idle(self, *, at_end: bool = False) -> None:
        self.now += 0.4
        lsn = self.progress.take_idle(self.now, at_end=at_end)
        if lsn:
            unsent = [record for record in self.wal if self.sent < record[3] <= lsn and record[2] >= self.confirmed]
            assert not unsent, f"the consumer would confirm {lsn} before it has {unsent}"
            self.queued.append(lsn)

    def write(self, count: int) -> None:
        self.progress.written(self.queued[:count])
        del self.queued[:count]

    def feedback(self, lsn: int) -> None:
        self.highest = max(self.highest, min(lsn, self.progress.written_lsn))
        self.progress.feedback(lsn, 0)

    def check(self) -> None:
        assert self.progress.confirmed_lsn <= max(self.sent, self.end)
        if self.is_strict:
            assert self.progress.confirmed_lsn <= self.highest, "more is confirmed than the consumer has confirmed"
            assert self.progress.status(self.now).flush_lsn <= self.highest
        for kind, _, start, end in self.wal:
            if kind in ("transaction", "commit") and self.confirmed <= start < self.progress.confirmed_lsn:
                assert end <= self.highest, f"lost: {end} was not confirmed by the consumer"
        self.confirmed = max(self.confirmed, self.progress.confirmed_lsn)


PREPARED_KINDS = ["transaction", "prepare", "commit", "empty", "rollback", "send", "send", "send", "write", "feedback", "restart"]
PREPARED_STEPS = st.lists(st.tuples(st.sampled_from(PREPARED_KINDS), st.integers(0, 300)), max_size=80)
STRICT_STEPS = st.lists(st.tuples(st.sampled_from([*PREPARED_KINDS, "idle", "idle", "last"]), st.integers(0, 300)), max_size=80)


def run_steps(server: Server, steps: list[tuple[str, int]]) -> None:
    """Run the steps, and then everything that is needed to confirm the end of the WAL."""
    for kind, number in steps:
        if kind == "send":
            server.send()
        elif kind in ("idle", "last"):
            server.idle(at_end=kind == "last")
        elif kind == "write":
            server.write(number)
        elif kind == "feedback":
            server.feedback(number)
        elif kind == "restart":
            server.connect()
        else:
            server.add(kind, number)
        server.check()
    server.connect()
    for _ in list(server.prepared):
        server.add("rollback", 0)
    while server.sent < server.end and server.confirmed < server.end:
        server.send()
    for _ in range(4):
        server.write(len(server.queued))
        server.feedback(server.end)
        server.send()
        server.idle()
        server.check()
    assert server.confirmed == server.end


@given(PREPARED_STEPS)
@example([("prepare", 0), ("transaction", 0), ("prepare", 0), ("commit", 0), *[("send", 0)] * 4, ("write", 9), ("feedback", 300)])
@example([("prepare", 0), ("transaction", 0), ("empty", 0), *[("send", 0)] * 3, ("write", 9), ("feedback", 300)])
def test_no_restart_is_stuck_and_nothing_is_lost_with_prepared_transactions(steps: list[tuple[str, int]]) -> None:
    run_steps(Server(), steps)


@given(STRICT_STEPS)
@example([("transaction", 0), ("send", 0), ("write", 9), ("send", 0), ("last", 0), ("feedback", 10), ("write", 9), ("restart", 0)])
@example([("prepare", 0), ("send", 0), ("send", 0), ("last", 0), ("write", 9), ("feedback", 300), ("restart", 0), ("commit", 0)])
def test_nothing_is_confirmed_that_the_consumer_has_not_confirmed(steps: list[tuple[str, int]]) -> None:
    """Also with idle positions. Nothing is lost, every restart progresses, and the end of the WAL is reached."""
    run_steps(Server(is_strict=True), steps)


def test_a_transaction_without_a_record_is_not_outstanding() -> None:
    """The consumer can confirm neither 20 nor 30, because it does not get them. It can confirm 10."""
    progress = Progress(0)
    for lsn in (10, 20, 30):
        progress.begin()
        progress.end(lsn)
        if lsn > 10:
            progress.silent(lsn)
        progress.written([lsn])
    progress.keepalive(1000, reply_requested=False)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0, True)
    progress.feedback(10, 0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (1000, False)
    progress.begin()
    progress.end(1010)
    progress.written([1010])
    progress.keepalive(2000, reply_requested=False)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (1000, True)


def test_a_transaction_without_a_record_is_not_outstanding_before_an_idle_position() -> None:
    progress = StrictProgress(0)
    progress.begin()
    progress.end(10)
    progress.silent(10)
    progress.written([10])
    progress.keepalive(50, reply_requested=False)
    assert progress.confirmed_lsn == 0
    assert progress.take_idle(0) == 50
    assert progress.is_outstanding
    progress.written([50])
    progress.feedback(50, 0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (50, False)
