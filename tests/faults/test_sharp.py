"""That the runs would notice: with a check taken out of the product, they report what it lets through."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from benchmarks.faults import frames, logs
from benchmarks.faults.campaign import Campaign, Fault
from lmcache_backends.disk import store
from lmcache_core.coding import coder


@pytest.mark.parametrize(
    "fault", [f for f in frames.FAULTS if f.name != "frame, file cut"], ids=lambda fault: fault.name
)
def test_without_the_frames_checks_damage_is_served(fault: Fault, tmp_path: Path) -> None:
    campaign = Campaign(fault.name, 12, 1, tmp_path)
    with mock.patch.object(coder, "decode", return_value=""):
        fault.inject(campaign)
    assert campaign.report.wrong > 0


def test_without_any_checks_a_damaged_log_serves_other_chunks(tmp_path: Path) -> None:
    (fault,) = [fault for fault in logs.FAULTS if fault.name == "log, cut"]
    campaign = Campaign(fault.name, 6, 1, tmp_path)
    with (
        mock.patch.object(coder, "decode", return_value=""),
        mock.patch.object(store, "check_of", return_value=0),
    ):
        fault.inject(campaign)
    assert campaign.report.wrong > 0
