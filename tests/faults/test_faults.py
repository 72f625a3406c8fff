"""The fault runs at the size of a test: nothing wrong, nothing lost, and the cache serves again after each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.__main__ import FAULTS
from benchmarks.faults.campaign import Campaign, Fault


def seconds(fault: Fault) -> float:
    return fault.few * fault.seconds


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, id=f.name, marks=[pytest.mark.slow] if seconds(f) > 5 else []) for f in FAULTS],
)
def test_nothing_is_wrong_or_lost_and_it_recovers(fault: Fault, tmp_path: Path) -> None:
    if missing := fault.missing():
        pytest.skip(missing)
    campaign = Campaign(fault.name, fault.few, 2, tmp_path)
    fault.inject(campaign)
    report = campaign.report
    notes = "\n".join(report.notes)
    assert report.runs == fault.few
    assert report.wrong == 0, notes
    assert report.lost == 0, notes
    assert report.recovered == report.runs, notes
