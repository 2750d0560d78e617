"""What was read of a job, and for how long it holds."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from rljob_operator.job_state import MAX_SNAPSHOT_AGE_SECONDS, Snapshot


@pytest.mark.parametrize(
    ("num_events", "age_seconds", "has_kuberay", "expected"),
    [
        pytest.param(3, 0.0, True, True, id="nothing happened"),
        pytest.param(4, 0.0, True, False, id="a watch event came in"),
        pytest.param(3, MAX_SNAPSHOT_AGE_SECONDS, True, False, id="an event may have been lost"),
        # Its installation is no event of the job: a job that waits for it would wait for the age limit.
        pytest.param(3, 0.0, False, False, id="KubeRay was missing"),
    ],
)
def test_a_snapshot_holds_until_something_happened(num_events, age_seconds, has_kuberay, expected):
    snapshot = Snapshot(
        document={},
        ray_clusters=() if has_kuberay else None,
        pods=(),
        namesakes=(),
        list_started=datetime.now(UTC),
        read_at=1000.0,
        num_events=3,
    )
    assert snapshot.is_current(num_events, 1000.0 + age_seconds) is expected
