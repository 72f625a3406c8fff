"""That the power cuts are cuts: without fsync they lose what was reported durable, and still nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.campaign import Campaign
from benchmarks.faults.power import FAULTS, cut_power


@pytest.mark.needs_root
def test_without_fsync_a_power_cut_loses_and_is_never_wrong(tmp_path: Path) -> None:
    if missing := FAULTS[0].missing():
        pytest.skip(missing)
    campaign = Campaign("power cut, no fsync", 1, 1, tmp_path)
    cut_power(campaign, fsync=False)
    report = campaign.report
    assert report.seen["durable before the cut"] > 10
    assert report.seen["came back"] < report.seen["durable before the cut"]
    assert report.wrong == 0
    assert report.recovered == 1
