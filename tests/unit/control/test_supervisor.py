"""What should start, drain and be forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from twostroke.cluster.control.supervisor import (
    STAYING,
    Drain,
    Forget,
    Member,
    MemberRole,
    MemberState,
    Start,
    reconcile,
    settled,
)
from twostroke.cluster.core.ids import WorkerId

STATE, DECODE, PREFILL, ROUTER = MemberRole.STATE, MemberRole.DECODE, MemberRole.PREFILL, MemberRole.ROUTER
READY = MemberState.READY


def member(worker_id: str, state: MemberState = READY, order: int | None = None) -> Member:
    role, _, index = worker_id.partition("-")
    return Member(WorkerId(worker_id), MemberRole(role), state, int(index) if order is None else order)


def test_the_state_server_comes_first_then_everything() -> None:
    desired = {STATE: 1, DECODE: 1, PREFILL: 2, ROUTER: 1}
    assert reconcile(desired, []) == [Start(WorkerId("state-0"), STATE)]
    assert reconcile(desired, [member("state-0", MemberState.STARTING)]) == []
    assert reconcile(desired, [member("state-0")]) == [
        Start(WorkerId("decode-0"), DECODE),
        Start(WorkerId("prefill-0"), PREFILL),
        Start(WorkerId("prefill-1"), PREFILL),
        Start(WorkerId("router-0"), ROUTER),
    ]


def test_scale_down_drains_the_newest() -> None:
    members = [member("decode-0", order=7), member("decode-1", order=2), member("decode-2", order=3)]
    assert reconcile({DECODE: 1}, members) == [Drain(WorkerId("decode-0")), Drain(WorkerId("decode-2"))]


def test_scale_down_drains_what_does_not_serve_before_what_does() -> None:
    members = [member("decode-0", MemberState.BACKOFF), member("decode-1"), member("decode-2")]
    assert reconcile({DECODE: 2}, members) == [Drain(WorkerId("decode-0"))]


def test_a_draining_member_keeps_its_id_and_counts_for_nothing() -> None:
    members = [member("decode-0"), member("decode-1", MemberState.DRAINING)]
    assert reconcile({DECODE: 2}, members) == [Start(WorkerId("decode-2"), DECODE)]


def test_a_lost_member_starts_again_under_its_own_id() -> None:
    members = [member("decode-0", MemberState.LOST), member("decode-1")]
    assert reconcile({DECODE: 2}, members) == [Forget(WorkerId("decode-0")), Start(WorkerId("decode-0"), DECODE)]


def test_a_restarting_member_is_left_to_its_keeper() -> None:
    states = [MemberState.BACKOFF, MemberState.STARTING, MemberState.FAILED]
    members = [member(f"decode-{index}", state) for index, state in enumerate(states)]
    assert reconcile({DECODE: 3}, members) == []
    assert not settled({DECODE: 3}, members)


def members_of_any_kind() -> st.SearchStrategy[list[Member]]:
    ids = st.lists(
        st.tuples(st.sampled_from(["decode", "prefill", "router"]), st.integers(0, 5)), unique=True, max_size=10
    )
    states = st.lists(st.sampled_from(list(MemberState)), min_size=10, max_size=10)
    return st.builds(
        lambda names, kinds: [
            member(f"{role}-{index}", state, order)
            for order, ((role, index), state) in enumerate(zip(names, kinds, strict=False))
        ],
        ids,
        states,
    )


@given(
    desired=st.fixed_dictionaries({role: st.integers(0, 4) for role in (DECODE, PREFILL, ROUTER)}),
    members=members_of_any_kind(),
)
def test_acting_on_the_actions_settles_within_one_drain(desired: dict[MemberRole, int], members: list[Member]) -> None:
    """After the actions and the end of what drains, nothing is left to do; ids are never given twice."""
    there = {each.worker_id: each for each in members}
    for _ in range(2):
        order = 100
        for action in reconcile(desired, there.values()):
            match action:
                case Forget(worker_id):
                    assert there.pop(worker_id).state not in STAYING
                case Drain(worker_id):
                    assert there[worker_id].state in STAYING
                    there[worker_id] = Member(worker_id, there[worker_id].role, MemberState.STOPPED, 0)
                case Start(worker_id, role):
                    assert worker_id not in there
                    there[worker_id] = Member(worker_id, role, READY, order := order + 1)
        there = {
            key: Member(key, each.role, MemberState.STOPPED, each.order)
            if each.state is MemberState.DRAINING
            else Member(key, each.role, READY, each.order)
            if each.state in STAYING
            else each
            for key, each in there.items()
        }
    assert reconcile(desired, there.values()) == []
    assert settled(desired, there.values())
