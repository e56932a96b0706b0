"""What is installed is compared with pins, and listed for a release (.ci/dependencies.py)."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from commands import REPO


@pytest.fixture
def tool() -> ModuleType:
    found = importlib.util.spec_from_file_location("dependencies", REPO / ".ci" / "dependencies.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def install(folder: Path, code: bytes) -> metadata.Distribution:
    """A distribution `rich` of one file."""
    info = folder / "rich-15.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (folder / "rich.py").write_bytes(code)
    (info / "METADATA").write_text("Name: rich\nVersion: 15.0.0\nLicense: MIT\n")
    (info / "WHEEL").write_text("Tag: py3-none-any\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(code).digest()).decode().rstrip("=")
    (info / "RECORD").write_text(f"rich.py,sha256={digest},{len(code)}\nrich-15.0.0.dist-info/RECORD,,\n")
    (found,) = metadata.distributions(path=[str(folder)])
    return found


def test_what_differs_from_its_pin_is_found(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = {"rich": install(tmp_path / "site", b"good")}
    monkeypatch.setattr(tool, "installed", lambda: there)
    monkeypatch.setattr(tool, "HASHES", tmp_path / "hashes.json")
    monkeypatch.setattr(tool, "pins", lambda: {"rich": "15.0.0"})
    tool.pin()
    assert tool.check() == []
    (tmp_path / "site" / "rich.py").write_bytes(b"evil")
    assert ["is not what rich 15.0.0 installed" in said for said in tool.check()] == [True]
    there["rich"] = install(tmp_path / "site", b"evil")  # with a RECORD that fits
    assert tool.check() == ["rich 15.0.0 py3-none-any has other files than .ci/hashes.json says"]
    monkeypatch.setattr(tool, "pins", lambda: {"rich": "14.0.0"})
    assert "rich 15.0.0 is installed, constraints.txt has 14.0.0" in tool.check()
    monkeypatch.setattr(tool, "pins", dict)
    assert "rich 15.0.0 is installed, and constraints.txt does not pin it" in tool.check()
    (tmp_path / "hashes.json").write_text("{}")
    capsys.readouterr()
    monkeypatch.setattr(tool, "pins", lambda: {"rich": "15.0.0"})
    assert tool.check() == []
    assert "the content of rich 15.0.0 py3-none-any is not pinned" in capsys.readouterr().err


def test_the_list_of_components(tool: ModuleType) -> None:
    found = tool.sbom()
    components = {one["name"]: one for one in found["components"]}
    assert components["torch"]["scope"] == "required"
    assert components["pytest"]["scope"] == "optional"
    assert components["torch"]["purl"].startswith("pkg:pypi/torch@")
    (own,) = (one for one in found["dependencies"] if one["ref"] == "fivefold")
    assert components["torch"]["bom-ref"] in own["dependsOn"]
    assert {"pip", "fivefold"}.isdisjoint(components)
