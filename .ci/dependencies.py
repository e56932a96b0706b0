"""What is installed beside Fivefold: checked against pins, and listed for a release. Standard library only.

    python .ci/dependencies.py check            versions and content of what is installed; also without a network
    python .ci/dependencies.py pin              writes the content of what is installed to .ci/hashes.json
    python .ci/dependencies.py sbom FILE        a list of components (CycloneDX 1.5, JSON)
    python .ci/dependencies.py known            asks pip-audit for known vulnerabilities, if it can be installed

The content of a distribution is the hash of all names and hashes in its RECORD. Files that pip writes by itself are
left out, so each wheel has one value. A wheel that .ci/hashes.json does not know (another system, another build of
PyTorch) is said, and checked against its own RECORD only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HASHES = ROOT / ".ci" / "hashes.json"
OWN = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "RECORD.jws", "RECORD.p7s")
OURS = {"fivefold"}
UNPINNED = {"pip"}  # brings itself up to date, and is not imported
PIP_AUDIT = "pip-audit==2.9.0"  # in an environment of its own


def name_of(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def installed() -> dict[str, metadata.Distribution]:
    """The distributions of this environment, by name."""
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    found = {name_of(d.metadata["Name"]): d for d in metadata.distributions(path=sorted(here))}
    return {name: found[name] for name in sorted(found.keys() - OURS - UNPINNED)}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        name_of(a): b
        for a, _, b in (line.partition("==") for line in lines if "==" in line and line[0] != "#")
    }


def wheel(found: metadata.Distribution) -> str:
    """Version and tags, as `2.1.0 cp311-cp311-linux_x86_64`."""
    tags = re.findall(r"(?m)^Tag: (.+)$", found.read_text("WHEEL") or "")
    return " ".join([found.version, *sorted(tags)])


def listed(found: metadata.Distribution) -> list[tuple[metadata.PackagePath, str]]:
    """(file, sha256 as hex) of the files of the wheel."""
    return [
        (path, base64.urlsafe_b64decode(f"{path.hash.value}==").hex())
        for path in found.files or ()
        if path.hash and path.name not in OWN and not str(path).startswith("..") and path.suffix != ".pyc"
    ]


def content(found: metadata.Distribution) -> str:
    rows = sorted(f"{path.as_posix()} {value}\n" for path, value in listed(found))
    return hashlib.sha256("".join(rows).encode()).hexdigest()


def check() -> list[str]:
    """What is wrong. Prints what cannot be said."""
    wrong, wanted, known = [], pins(), json.loads(HASHES.read_text())
    there = installed()
    for name, found in there.items():
        version = found.version.partition("+")[0]
        if name not in wanted:
            wrong.append(f"{name} {found.version} is installed, and constraints.txt does not pin it")
        elif wanted[name] != version:
            wrong.append(f"{name} {found.version} is installed, constraints.txt has {wanted[name]}")
        pinned = known.get(name, {}).get(wheel(found))
        if pinned is None:
            print(f"note: the content of {name} {wheel(found)} is not pinned", file=sys.stderr)
        elif pinned != content(found):
            wrong.append(f"{name} {wheel(found)} has other files than .ci/hashes.json says")
        for path, value in listed(found):
            with open(str(path.locate()), "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != value:
                    wrong.append(f"{path.locate()} is not what {name} {found.version} installed")
    print(f"{len(there)} distributions checked, {len(wrong)} wrong")
    return wrong


def pin() -> None:
    """Adds what is installed to the known wheels; versions that constraints.txt no longer has are dropped."""
    known, wanted = json.loads(HASHES.read_text()) if HASHES.exists() else {}, pins()
    for name, found in installed().items():
        if name in wanted:
            kept = {
                key: value
                for key, value in known.get(name, {}).items()
                if key.split("+")[0].split()[0] == wanted[name]
            }
            known[name] = kept | {wheel(found): content(found)}
    HASHES.write_text(
        json.dumps({name: known[name] for name in sorted(known) if name in wanted}, indent=1) + "\n"
    )


def sbom() -> dict[str, object]:
    """The components: Fivefold, and what it needs at run time or for an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there, components = installed(), []
    needed = _needed(project["dependencies"], there)
    for name, found in there.items():
        licence = found.metadata["License-Expression"] or found.metadata["License"] or ""
        components.append(
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{name}@{found.version}",
                "purl": f"pkg:pypi/{name}@{found.version}",
                "name": name,
                "version": found.version,
                "scope": "required" if name in needed else "optional",
                "hashes": [{"alg": "SHA-256", "content": content(found)}],
                "licenses": [{"license": {"name": licence.splitlines()[0][:100]}}] if licence.strip() else [],
            }
        )
    root = {"type": "application", "name": "fivefold", "version": project["version"], "bom-ref": "fivefold"}
    refs = {c["name"]: c["bom-ref"] for c in components}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": root},
        "components": components,
        "dependencies": [
            {
                "ref": "fivefold",
                "dependsOn": sorted(refs[n] for n in map(_required, project["dependencies"]) if n in refs),
            },
            *(
                {"ref": refs[name], "dependsOn": sorted({refs[n] for n in _plain(found) if n in refs})}
                for name, found in there.items()
            ),
        ],
    }


def _required(text: str) -> str:
    return name_of(re.split(r"[\s<>=!~;\[(]", text, maxsplit=1)[0])


def _plain(found: metadata.Distribution) -> list[str]:
    return [_required(text) for text in found.requires or () if "extra ==" not in text]


def _needed(requirements: list[str], there: dict[str, metadata.Distribution]) -> set[str]:
    found, new = set(), [*map(_required, requirements)]
    while new:
        if (name := new.pop()) not in found and name in there:
            found.add(name)
            new += _plain(there[name])
    return found


def known() -> int:
    """Runs pip-audit in an environment of its own. Returns 1 if a pinned version has a known vulnerability."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python, listed = f"{folder}/bin/python", Path(folder, "pins.txt")
        install = [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--retries",
            "1",
            PIP_AUDIT,
        ]
        if subprocess.run(install, check=False, capture_output=True).returncode:
            print("note: pip-audit cannot be installed here; vulnerabilities are not looked up")
            return 0
        wanted = [f"{name}=={version}" for name, version in pins().items()]
        for some in (wanted[:1], wanted):  # one first: not every index has a list of vulnerabilities
            listed.write_text("\n".join(some) + "\n")
            audit = [
                "-r",
                str(listed),
                "--no-deps",
                "--disable-pip",
                "--progress-spinner",
                "off",
                "-f",
                "json",
            ]
            done = subprocess.run(
                [python, "-m", "pip_audit", *audit], check=False, capture_output=True, text=True, timeout=900
            )
            found = json.loads(done.stdout)["dependencies"] if done.stdout else []
            if not any("vulns" in one for one in found):
                print(
                    "note: the index has no list of vulnerabilities, or cannot be reached; they are not looked up"
                )
                return 0
        bad = [
            f"{one['name']} {one['version']}: {v['id']}, mended in {', '.join(v['fix_versions']) or 'no version'}"
            for one in found
            for v in one.get("vulns", ())
        ]
        print("\n".join([*bad, f"{len(found)} versions looked up, {len(bad)} known vulnerabilities"]))
        return bool(bad)


def main() -> int:
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "check":
        wrong = check()
        print("\n".join(wrong))
        return bool(wrong)
    if command == "pin":
        pin()
    elif command == "sbom" and len(sys.argv) == 3:
        Path(sys.argv[2]).write_text(json.dumps(sbom(), indent=1) + "\n")
    elif command == "known":
        return known()
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
