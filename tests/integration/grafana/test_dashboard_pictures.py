"""The dashboards as Grafana's own components draw them from a live fleet, in a real browser: nothing empty or broken.

What queries alone do not show: transformations that do not merge, panels without a drawing, units that cannot be read.
"""

from __future__ import annotations

import os
import struct

import pytest

import pictures

pytestmark = pytest.mark.slow

WIDTH, LEAST_HEIGHT = 1400, 1000
MOST_BYTES = 200_000
"""They are kept in the repository."""
LEAST_INK, LEAST_PANELS = 0.01, 10
"""Of a panel with a table of one row it is a twentieth, the rest being background; of one that is blank, nothing."""


@pytest.fixture(scope="module", autouse=True)
def built():
    """The page, bundled from its sources as they are."""
    if lacking := pictures.missing():
        if os.environ.get("CI") or os.environ.get("TORCHMEM_REQUIRE_TOOLS") == "1":
            pytest.fail(lacking)
        pytest.skip(lacking)
    pictures.build()


@pytest.mark.parametrize("name", pictures.SHOWN)
def test_every_panel_is_drawn(name, fleet, chromium, tmp_path):
    """Somebody would open a dashboard and read "No data", an error, or nothing at all."""
    panels = pictures.draw(fleet.url, chromium, tmp_path, name, minutes=fleet.minutes)
    assert [panel for panel in panels if panel.state != "data"] == []
    assert [panel for panel in panels if panel.ink < LEAST_INK] == []
    assert len(panels) > LEAST_PANELS
    picture = (tmp_path / f"{name}.png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert width == WIDTH
    assert height > LEAST_HEIGHT
    assert len(picture) < MOST_BYTES
