"""The router's queue: bounds, order, passing, and honest Retry-After."""

import pytest

from twostroke.cluster.core.errors import Overloaded
from twostroke.router.admission import MAX_RETRY_AFTER_S, MAX_WAIT_S, AdmissionQueue, Entry, Placed


def queue_of(*sizes: int, max_queued: int = 100, reserve_skip: int = 8) -> AdmissionQueue[int]:
    """Items are numbered 0, 1, ... with these sizes."""
    queue: AdmissionQueue[int] = AdmissionQueue(max_queued, reserve_skip)
    for number, size in enumerate(sizes):
        queue.offer(number, size, 60.0, 0.0)
    return queue


def take(queue: AdmissionQueue[int], *placeable: int, held: tuple[int, ...] = (), now: float = 0.0) -> list[int]:
    """Place those that may be; answers what was asked about, in order."""
    asked: list[int] = []

    def place(item: int) -> Placed:
        asked.append(item)
        if item in held:
            return Placed.HELD
        return Placed.PLACED if item in placeable else Placed.BLOCKED

    queue.take(place, now)
    return asked


def test_first_come_first_placed() -> None:
    queue = queue_of(1, 2, 3)
    assert take(queue, 0, 1, 2) == [0, 1, 2]
    assert len(queue) == 0


def test_only_smaller_ones_pass_a_blocked_head() -> None:
    queue = queue_of(10, 10, 11, 9)
    assert take(queue, 1, 2, 3) == [0, 3]
    assert len(queue) == 3


def test_a_blocked_head_is_passed_a_limited_number_of_times_ever() -> None:
    queue = queue_of(10, 1, 1, 1, 1, reserve_skip=3)
    assert take(queue, 1, 2) == [0, 1, 2, 3]
    assert take(queue, 3, 4) == [0, 3]
    assert take(queue, 4) == [0]
    assert take(queue, 0, 4) == [0, 4]


def test_one_that_waits_for_itself_only_blocks_nobody() -> None:
    queue = queue_of(1, 50)
    assert take(queue, 1, held=(0,)) == [0, 1]
    assert len(queue) == 1


def test_a_full_queue_refuses_with_a_wait() -> None:
    queue = queue_of(1, 1, max_queued=2)
    with pytest.raises(Overloaded) as refusal:
        queue.offer(2, 1, 60.0, 0.0)
    assert refusal.value.retry_after_s >= 1


def placing_every_two_seconds(max_queued: int = 100) -> AdmissionQueue[int]:
    """Ten placements in twenty seconds, ten still wait."""
    queue = queue_of(*[1] * 20, max_queued=max_queued)
    for number in range(10):
        take(queue, number, now=2.0 * (number + 1))
    return queue


def test_retry_after_follows_from_the_rate_of_placements() -> None:
    queue = placing_every_two_seconds(max_queued=20)
    for number in range(10):
        queue.offer(100 + number, 1, 600.0, 20.0)
    with pytest.raises(Overloaded) as refusal:
        queue.offer(99, 1, 600.0, 20.0)
    assert refusal.value.retry_after_s == 40


def test_a_request_that_cannot_be_served_in_time_is_refused_at_once() -> None:
    queue = placing_every_two_seconds()
    with pytest.raises(Overloaded, match="needs about"):
        queue.offer(99, 1, 5.0, 20.0)
    queue.offer(99, 1, 50.0, 20.0)


def place_at(queue: AdmissionQueue[int], *times: float) -> None:
    """One entry each time."""
    for now in times:
        placed: list[int] = []

        def place(item: int, placed: list[int] = placed) -> Placed:
            placed.append(item)
            return Placed.PLACED if len(placed) == 1 else Placed.BLOCKED

        queue.take(place, now)


def test_what_the_first_fill_took_and_how_long_the_first_step_lasts_is_no_pace() -> None:
    """Seen: 130 wait, two were placed at once, workers compile for ten seconds: "the queue needs about 650 s"."""
    queue = queue_of(*[1] * 132, max_queued=1000)
    place_at(queue, 0.0, 0.0)
    for quarter in range(1, 240):
        queue.offer(1000, 1, 60.0, quarter / 4)


def test_a_stall_costs_its_time_once_and_not_once_for_each_that_waits() -> None:
    queue = queue_of(*[1] * 200, max_queued=1000)
    place_at(queue, *(number / 5 for number in range(50)))
    queue.offer(1000, 1, 60.0, 30.0)  # twenty seconds without any
    with pytest.raises(Overloaded, match="151 stand before it, one is placed each 0.2 s"):
        queue.offer(1000, 1, 40.0, 30.0)
    place_at(queue, *(30.0 + number / 5 for number in range(8)))
    forecast = queue.forecast(32.0, 32.0)
    assert forecast is not None
    assert forecast.wait_s == pytest.approx(0.2 * forecast.num_ahead + 0.6)


def test_one_that_waits_long_for_pages_says_nothing_to_those_who_may_pass_it() -> None:
    """They come once a minute, and so are placed: that is not the queue's pace."""
    queue = queue_of(1000)
    for minute in range(1, 30):
        queue.offer(minute, 1, 10.0, 60.0 * minute)
        queue.remove(queue.offer(-minute, 1, 10.0, 60.0 * minute + 1.0))
        queue.take(lambda item: Placed.PLACED if item else Placed.BLOCKED, 60.0 * minute + 2.0)
    for number in range(50):
        queue.offer(number, 1, 10.0, 1800.0)


def test_a_slow_flow_is_believed_after_a_few_placements() -> None:
    queue = queue_of(*[1] * 100, max_queued=1000)
    place_at(queue, *(10.0 * number for number in range(8)))
    queue.offer(1000, 1, 60.0, 79.0)
    place_at(queue, 80.0)
    with pytest.raises(Overloaded, match="about 920 s"):
        queue.offer(1000, 1, 60.0, 80.0)


def test_placements_of_one_moment_are_one_step() -> None:
    """Four grants arrive within milliseconds every ten seconds: 2.5 s each, however the clock tells them apart."""
    queue = queue_of(*[1] * 100, max_queued=1000)
    place_at(queue, *(10.0 * (number // 4) + 0.002 * (number % 4) for number in range(36)))
    forecast = queue.forecast(80.0, 80.0)
    assert forecast is not None
    assert forecast.pace_s == pytest.approx(2.5)


def test_what_goes_first_does_not_wait_for_what_it_passes() -> None:
    queue = placing_every_two_seconds()
    queue.offer(99, 1, 5.0, 20.0, priority=-1000)
    with pytest.raises(Overloaded, match="11 stand before it"):
        queue.offer(99, 1, 5.0, 20.0)


def test_a_forecast_and_its_retry_after_are_bounded() -> None:
    queue = queue_of(*[1] * 1000, max_queued=1000)
    place_at(queue, *(500.0 * number for number in range(10)))
    forecast = queue.forecast(1e9, 1e9)
    assert forecast is not None
    assert forecast.wait_s == MAX_WAIT_S
    with pytest.raises(Overloaded) as refusal:
        queue.offer(99, 1, 5.0, 4500.0)
    assert refusal.value.retry_after_s == MAX_RETRY_AFTER_S


def test_idle_time_says_nothing_about_the_wait() -> None:
    queue = queue_of(1, 1)
    take(queue, 0, 1, now=1.0)
    queue.offer(2, 1, 0.5, 25.0)
    queue.offer(3, 1, 0.5, 25.0)


def test_what_is_put_back_stands_where_its_arrival_places_it() -> None:
    queue: AdmissionQueue[int] = AdmissionQueue(10, 8)
    entries = [queue.offer(number, 1, 60.0, 0.0) for number in range(3)]
    take(queue, 0, 1, 2)
    for number in (2, 1, 0):
        queue.put_back(entries[number])
    assert take(queue, 0, 1, 2) == [0, 1, 2]


def test_a_continuation_stands_before_new_requests() -> None:
    queue: AdmissionQueue[int] = AdmissionQueue(10, 8)
    entries = [queue.offer(number, 1, 60.0, 0.0) for number in range(3)]
    take(queue, 0, 1, 2)
    queue.put_back(entries[0])
    entries[2].rank = 0
    queue.put_back(entries[2])
    assert take(queue, 0, 2) == [2, 0]


def test_removing_is_idempotent_and_put_back_never_refuses() -> None:
    queue: AdmissionQueue[int] = AdmissionQueue(1, 8)
    entry = queue.offer(0, 1, 60.0, 0.0)
    queue.remove(entry)
    queue.remove(entry)
    queue.offer(1, 1, 60.0, 0.0)
    queue.put_back(entry)
    assert len(queue) == 2


def asking_queue() -> tuple[AdmissionQueue[int], Entry[int]]:
    queue: AdmissionQueue[int] = AdmissionQueue(max_queued=1, reserve_skip=8)
    entry = queue.offer(0, 1, 60.0, 0.0)
    queue.take(lambda item: Placed.ASKED, 0.0)
    return queue, entry


def test_one_that_asks_for_pages_keeps_its_place_in_the_bound_until_it_has_them() -> None:
    queue, entry = asking_queue()
    assert (len(queue), queue.num_waiting) == (0, 1)
    with pytest.raises(Overloaded):
        queue.offer(1, 1, 60.0, 0.0)
    queue.put_back(entry)  # in vain
    assert (len(queue), queue.num_waiting) == (1, 1)
    queue.take(lambda item: Placed.ASKED, 0.0)
    queue.settle(entry, 1.0)
    queue.settle(entry, 1.0)
    assert queue.num_waiting == 0
    queue.offer(1, 1, 60.0, 2.0)


def test_one_that_leaves_while_it_asks_makes_room() -> None:
    queue, entry = asking_queue()
    queue.remove(entry)
    queue.remove(entry)
    assert queue.num_waiting == 0
    queue.offer(1, 1, 60.0, 0.0)


def test_asking_in_vain_is_no_placement_that_waits_are_predicted_from() -> None:
    queue, entry = asking_queue()
    for now in range(1, 9):
        queue.put_back(entry)
        queue.take(lambda item: Placed.ASKED, float(now))
    assert queue.forecast(9.0, 9.0) is None


def test_a_lower_priority_goes_first_and_a_step_is_worth_a_second() -> None:
    queue: AdmissionQueue[int] = AdmissionQueue(10, 8)
    for number, (priority, now) in enumerate([(0, 0.0), (-1, 0.0), (5, 0.0), (0, 4.0), (0, 6.0)]):
        queue.offer(number, 1, 60.0, now, priority)
    assert take(queue, 0, 1, 2, 3, 4) == [1, 0, 3, 2, 4]
