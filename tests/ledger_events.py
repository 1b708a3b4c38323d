"""Any events of a ledger, for the tests that hold one against the plain one, event for event."""

from __future__ import annotations

from hypothesis import strategies as st

from torchmem.ledger import FrameKind
from torchmem.model import RefType

PARENTS = [0, 0, 1, 2, 2, 1]
"""Of the owners that events are of."""
_OWNERS = st.integers(0, len(PARENTS) - 1)
_REFTYPES = st.sampled_from([int(r) for r in RefType])
_STACKS = st.integers(0, 1)
_DEVICES = st.sampled_from([0, 3])
_TASKS = st.integers(1, 2)
_FORWARD, _LABEL = st.just(int(FrameKind.FORWARD)), st.just(int(FrameKind.LABEL))


def events(addresses):
    """One event, as the name of a method and its arguments; the fewer addresses, the oftener blocks collide."""

    def allocate(reftypes):
        return st.tuples(st.just("allocate"), _STACKS, addresses, st.integers(1, 1000), _DEVICES, _OWNERS, reftypes)

    return st.one_of(
        allocate(_REFTYPES),
        allocate(st.just(int(RefType.ACTIVATION))),
        st.tuples(st.just("release"), _STACKS, addresses),
        st.tuples(st.just("release"), _STACKS, addresses),
        st.tuples(st.just("relabel"), addresses, _OWNERS, _REFTYPES),
        st.tuples(st.just("push"), _STACKS, _OWNERS, _FORWARD, st.just(0), st.just(-1)),
        st.tuples(st.just("push"), _STACKS, _OWNERS, _LABEL, _REFTYPES, st.just(-1)),
        st.tuples(st.just("pop"), _STACKS),
        st.tuples(st.just("enter_backward"), _STACKS, _OWNERS, _TASKS),
        st.tuples(st.just("settle"), _STACKS, _TASKS),
        st.tuples(st.just("end_step")),
        st.tuples(st.just("rotate_windows")),
    )
