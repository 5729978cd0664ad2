"""Deadlines: order, moving, discarding, bounded memory."""

from twostroke.engine.deadlines import Deadlines


def test_expired_keys_come_once_and_in_order() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("late", 3.0)
    deadlines.set("early", 1.0)
    assert deadlines.next_s() == 1.0
    assert deadlines.pop_expired(0.9) == []
    assert deadlines.pop_expired(3.0) == ["early", "late"]
    assert deadlines.pop_expired(9.0) == []
    assert deadlines.next_s() is None


def test_a_moved_deadline_counts_only_at_its_new_time() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("a", 5.0)
    assert deadlines.pop_expired(2.0) == []
    assert deadlines.next_s() == 5.0


def test_a_discarded_deadline_never_comes() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.discard("a")
    deadlines.discard("a")
    assert deadlines.pop_expired(2.0) == []


def test_moving_one_key_a_thousand_times_keeps_the_heap_small() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for second in range(1000):
        deadlines.set("a", float(second))
    assert len(deadlines) == 1
    assert len(deadlines._heap) < 200
    assert deadlines.next_s() == 999.0
