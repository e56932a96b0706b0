"""What mkdocs.yml cannot say (mkdocs calls the functions on_...).

The pages have the paths of the repository, so README.md, docs/ and all links between them, also to programs and
results, work here as they do there.
"""

from __future__ import annotations

import html
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "fivefold"
LINK = re.compile(r"(?<=\]\()([^)#\s]+)")  # the path of a Markdown link
FORMULA = re.compile(r'<(span|div) class="arithmatex">(\\[(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
SHORT = re.compile(r"<code>([^<]{1,24})</code>")
PICTURE = re.compile(r'(?<!">)(<img [^>]*src="([^"]+)"[^>]*>)')
LANGUAGES = {
    ".py": "python",
    ".sh": "sh",
    ".sbatch": "sh",
    ".yaml": "yaml",
    ".toml": "toml",
    ".c": "c",
    ".cpp": "cpp",
    ".cu": "cuda",
    "": "text",
}
PUBLIC = "{show_root_heading: false, show_root_toc_entry: false, show_submodules: false, show_if_no_docstring: true}"
ROOM = "---\ntitle: {}\nsearch:\n  boost: 0.2\n---\n"  # below the pages that explain
ASKED = "docs/start/troubleshooting.md"
"""Who searches words of an error, such as "out of memory", finds this page first."""
SILENT = "---\nsearch:\n  exclude: true\n---\n"


# ---- the tree of pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Gives each file its path in the repository; adds what is linked, and the API reference."""
    ours = [file.src_uri for file in files if file.src_dir == config.docs_dir]
    paths = [f"docs/{uri}" for uri in ours if not uri.endswith(".py")]
    paths += [path.name for path in ROOT.glob("*.md")]
    paths += [f"{folder}/README.md" for folder in ("deploy", "benchmarks")]
    found = Files(file for file in files if file.src_uri not in ours)
    for path in paths:
        found.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    linked = {path for page in found.documentation_pages() for path in _outside(page, found)}
    folders = {path for path in linked if (ROOT / path).is_dir()}
    listed = {path for folder in folders for path in _programs(folder)}
    for path in sorted((linked | listed) - folders):
        if (language := LANGUAGES.get(Path(path).suffix)) is None:  # results
            found.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        page = f"{SILENT}# `{path}`\n\n`````{language}\n{text}`````\n"
        _add(found, config, f"{path}.md", page, InclusionLevel.NOT_IN_NAV)
    for folder in sorted(folders):
        _add(found, config, f"{folder}/README.md", _listing(folder))
    for uri, text in reference().items():
        _add(found, config, uri, text)
    config.nav = _expanded(config.nav or [], [file for file in found.documentation_pages() if in_nav(file)])
    return found


def in_nav(file: File) -> bool:
    return file.inclusion is not InclusionLevel.NOT_IN_NAV


def _add(
    files: Files,
    config: MkDocsConfig,
    uri: str,
    text: str,
    inclusion: InclusionLevel = InclusionLevel.UNDEFINED,
) -> None:
    files.append(File.generated(config, uri, content=text, inclusion=inclusion))


def _outside(file: File, files: Files) -> list[str]:
    """Paths that a page links and that are not in the site yet: files, and folders without a README."""
    paths = (_target(file.src_uri, link) for link in LINK.findall(file.content_string))
    return [
        path
        for path in paths
        if (ROOT / path).exists()
        and not any(files.get_file_from_path(known) for known in (path, f"{path}/README.md"))
    ]


def _target(page: str, link: str) -> str:
    """The path in the repository that a link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(link)))


def _programs(folder: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("*.py"))


def _listing(folder: str) -> str:
    """A page of the programs in a folder, each with the first line of its docstring."""
    lines = [f"# `{folder}/`", ""]
    for path in _programs(folder):
        first = (ROOT / path).read_text(encoding="utf-8").lstrip('"').splitlines()[0].rstrip('"')
        lines.append(f"- [`{Path(path).name}`]({Path(path).name}): {first}")
    return "\n".join(lines) + "\n"


def _expanded(nav: Any, pages: list[File]) -> Any:
    """The navigation with its patterns replaced by the pages that no other line names."""
    named = set(re.findall(r"[\w./-]+\.md", repr(nav)))

    def expand(item: Any) -> list[Any]:
        if isinstance(item, dict):
            [(title, part)] = item.items()
            parts = part if isinstance(part, str) else _flat(expand, part)
            return [{title: parts}] if parts else []
        if not item.endswith("*"):
            return [item]
        folder = posixpath.dirname(item)
        here = [page.src_uri for page in pages if posixpath.dirname(page.src_uri) == folder]
        return sorted(
            (uri for uri in here if uri not in named), key=lambda uri: (not uri.endswith("README.md"), uri)
        )

    return _flat(expand, nav)


def _flat(expand: Any, items: Any) -> list[Any]:
    return [found for item in items for found in expand(item)]


# ---- the API reference


def reference() -> dict[str, str]:
    """A page of the public names, and one of each room of the package."""
    top = "# API reference\n\nThe names of `import fivefold`. The other pages have one room of the program each.\n\n"
    pages = {"reference/README.md": f"{top}::: fivefold\n    options: {PUBLIC}\n"}
    for path in sorted(PACKAGE.iterdir()):
        if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem != "__init__"):
            name = f"fivefold.{path.stem}"
            pages[f"reference/{path.stem}.md"] = (
                f"{ROOM.format(name)}::: {name}\n    options: {{heading_level: 1}}\n"
            )
    return pages


# ---- text of a page


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to programs and folders to their pages."""
    if page.file.src_uri == ASKED:
        page.meta["search"] = {"boost": 8}

    def lead(found: re.Match[str]) -> str:
        link = found[0]
        path = _target(page.file.src_uri, link)
        for more in (".md", "/README.md"):
            if (ROOT / path).exists() and files.get_file_from_path(path + more):
                return link.rstrip("/") + more
        return link

    return LINK.sub(lead, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Writes formulas as MathML, which browsers show without a script. Pictures lead to themselves: a phone shows them
    small. Short code stays on one line."""

    def mathml(found: re.Match[str]) -> str:
        kind, how, tex = found[1], "inline" if found[2] == r"\(" else "block", html.unescape(found[3])
        return f'<{kind} class="arithmatex">{convert(tex.strip(), display=how)}</{kind}>'

    content = PICTURE.sub(r'<a href="\2">\1</a>', FORMULA.sub(mathml, content))
    return SHORT.sub(r'<code class="short">\1</code>', content)


# ---- the finished site


class _Read(HTMLParser):
    """The names in a page, and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names, self.links, self.loads = set[str](), set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.names |= {value for key in ("id", "name") if (value := found.get(key))}
        if link := found.get("href") or found.get("src"):
            (self.links if tag == "a" else self.loads).add(link)


def on_post_build(config: MkDocsConfig) -> None:
    """Raises PluginError if a link is broken, or if a page loads something from elsewhere."""
    site = Path(config.site_dir)
    pages = {
        path: _Read(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.stem != "404"
    }
    wrong = []
    for path, page in pages.items():
        for link in page.links | page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    wrong.append(f"{path.relative_to(site)} loads {link}")
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            name = unquote(parts.fragment)
            if not there.is_file() or (name and there in pages and name not in pages[there].names):
                wrong.append(f"{path.relative_to(site)} leads to {link}")
    for path in site.rglob("*.css"):
        outside = re.findall(
            r"url\([\"']?(?:https?:)?//[^)]*|@import[^;]*//[^;]*", path.read_text(encoding="utf-8")
        )
        wrong += [f"{path.relative_to(site)} loads {found}" for found in outside]
    if wrong:
        raise PluginError("\n".join(["the site has broken links:", *sorted(wrong)]))
