"""The page of the wheel: README.md with links that work away from the repository. All else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
BRANCH = "main"
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?://|#)([^)\s]+)\)")


def page() -> str:
    """README.md with absolute links below [project.urls] Repository, without what only a copy of the repository has and
    without the marks of figures."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"].rstrip("/")

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found[1].startswith("!") else "blob"
        return f"{found[1]}{repository}/{kind}/{BRANCH}/{found[2]})"

    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!-- repository -->.*?<!-- /repository -->\n|<!--.*?-->", "", text, flags=re.DOTALL)
    return LINK.sub(absolute, text)


if __name__ == "__main__":
    setup(long_description=page(), long_description_content_type="text/markdown")
