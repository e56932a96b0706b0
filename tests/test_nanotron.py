"""Training with fp8 weights, gradients and moments: layouts, resume, bytes."""

import pytest
from layouts import compared, tiny


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2,sp=true", "pp=2"])
def test_layouts(tmp_path, layout):
    report = compared(tiny(tmp_path, layout, mode="nanotron"))
    print(report)
    assert report.passed, report
