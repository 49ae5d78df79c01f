"""What the site has beside docs/*.md: a hook of mkdocs.

Pages that GitHub shows in other places of the repository are the site's pages too, and each public package has a page of its docstrings. Links
to other files lead to the repository. Assistants find the whole text in llms.txt and llms-full.txt, in the form of https://llmstxt.org/.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import cast

import griffe
import jinja2
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/hvlaunch/hvlaunch"
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "overview.md",
    "SECURITY.md": "security-policy.md",
    "examples/README.md": "guides/examples.md",
    "hostfiles/README.md": "reference/hostfiles.md",
}
"""Path in the repository, and in the site."""
SOURCES = {path: source for source, path in PAGES.items()}
REFERENCE: Mapping[str, Mapping[str, Sequence[str]]] = {
    "hvlaunch": {
        "Calling functions, and hosts that stay connected": ("api.launcher",),
        "Jobs": ("api.job",),
        "Errors": ("api.errors",),
    },
    "hvlaunch.torch": {
        "Beginning and end": ("torch",),
        "Ranks and groups": ("torch.current",),
        "Collectives": ("torch.differentiable",),
        "Operators, asynchronous collectives, and join()": ("torch.collectives",),
        "Training": ("torch.optimizer", "torch.sharing"),
        "Stores": ("torch.http_store",),
        "How it was built": ("torch.backends",),
    },
    "hvlaunch.torch.elastic": {
        "Training": ("torch.elastic",),
        "State": ("torch.elastic.state",),
        "Why a round ends": ("torch.group_errors",),
    },
    "hvlaunch.torch.group_errors": {"Errors": ("torch.group_errors",)},
    "hvlaunch.rendezvous": {
        "Progress": ("rendezvous.worker",),
        "The client": ("rendezvous.client",),
        "Errors": ("rendezvous",),
    },
    "hvlaunch.errors": {"Errors": ("errors",)},
}
"""The public packages, and what of them is from which modules."""
ALONE = "{heading_level: 1, members: false, show_root_full_path: true}"
"""A package as the head of its page."""
INHERITING = "\n    options: {inherited_members: false, show_bases: true}"
"""An error has what its base has, which is said there alone."""
BOOSTS = {
    "start.md": 4,
    "guides": 4,
    "from": 3,
    "explain": 1,
    "reference": 1,
    "interfaces": 0.4,
    "api": 0.1,
    "internals": 0.05,
}
"""How much a page of a folder counts in a search: readers look for what to do, and then for what it rests on. Any other page: 0.1."""
NOT_SEARCHED = ("internals/records/", "internals/walks.md")
"""Long lists of figures and files: every page loads the search's index, which they would make a tenth larger."""
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
TERM = re.compile(r'^\| <a id="[\w-]+"></a>([\w ]+) \|', re.MULTILINE)
AS_IT_IS = re.compile(
    r"```.*?```|`[^`]*`|^#.*?$|^\|.*?$|!?\[[^\]]*\]\([^)]*\)|<[^>]*>", re.DOTALL | re.MULTILINE
)
"""Of a page, what gets no link: code, headings, tables, other links, HTML."""
NAMED = re.compile(r"docs/([a-z/-]+)\.md(#[\w-]+)?")
"""A page, as docstrings name it."""
NOT_FOR_ASSISTANTS = ("api/", "internals/", "changelog.md", "contributing.md", "index.md")
"""Pages for developers, and the landing page, whose text README has too."""
LINK = re.compile(r"(?<=]\()(?P<path>[^)#:\s]+)(?P<part>#[^)]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, path in PAGES.items():
        files.append(File.generated(config, path, content=(ROOT / source).read_text(encoding="utf-8")))
    package = griffe.load("hvlaunch", search_paths=[str(ROOT)], allow_inspection=False)
    for name, sections in REFERENCE.items():
        part = package[name.partition(".")[2]] if "." in name else package
        content = reference(cast("griffe.Object", part), sections)
        files.append(File.generated(config, f"api/{name}.md", content=content))
    return files


def reference(package: griffe.Object, sections: Mapping[str, Sequence[str]]) -> str:
    """The page of a package: the docstrings of all names that it offers, and where those are that another page has."""
    offered = [package.members[str(name)] for name in package.exports or () if name != "__version__"]
    blocks = [f"::: {package.path}\n    options: {ALONE}"]
    for title, modules in sections.items():
        blocks.append(f"## {title}")
        for module in modules:
            found = [
                member for member in offered if whole_path(member).rpartition(".")[0] == f"hvlaunch.{module}"
            ]
            offered = [member for member in offered if member not in found]
            options = INHERITING if title == "Errors" or module.endswith("errors") else ""
            blocks += [f"::: {member.path}{options}" for member in found]
    if offered:
        blocks += ["## More", *(f"`{member.name}` is {elsewhere(member)}." for member in offered)]
    return "\n\n".join(blocks)


def whole_path(member: griffe.Object | griffe.Alias) -> str:
    """Where it is defined."""
    return member.target_path if isinstance(member, griffe.Alias) else member.path


def elsewhere(member: griffe.Object | griffe.Alias) -> str:
    """What stands for a name that another page has, or that is torch's."""
    path = whole_path(member)
    return f"[`{path}`][{path}]" if path.startswith("hvlaunch.") else f"`{path}`"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 (mkdocs gives them by name)
    """Lead its links to where their files are, link the words of the glossary, and say how much the page counts in a search."""
    here = page.file.src_uri
    section = here.partition("/")[0]
    page.meta["search"] = {"boost": BOOSTS.get(section, 0.1), "exclude": here.startswith(NOT_SEARCHED)}
    if section in ("start.md", "guides", "from", "explain", "reference") and here != "reference/glossary.md":
        markdown = with_terms(markdown, relpath("reference/glossary.md", dirname(here) or "."))
    folder = dirname(SOURCES.get(here, f"docs/{here}"))

    def led(link: re.Match[str]) -> str:
        target, part = normpath(join(folder, link["path"])), link["part"] or ""
        other = target.removeprefix("docs/") if target.startswith("docs/") else ""
        path = PAGES.get(target) or PAGES.get(f"{target}/README.md") or other
        file = files.get_file_from_path(path)
        if file is not None and file.inclusion.is_included():  # type: ignore[no-untyped-call]
            return relpath(path, dirname(here) or ".") + part
        if not (ROOT / target).exists():
            return link[0]
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/HEAD/{target}{part}"

    return LINK.sub(led, markdown)


def with_terms(markdown: str, glossary: str) -> str:
    """Link the first use of each word of the glossary in a sentence of the page."""
    words = sorted(TERM.findall(GLOSSARY.read_text(encoding="utf-8")), key=len, reverse=True)
    if "ssh-add" in markdown:
        words.remove("agent")  # that page has ssh's agent as well
    seen = set()

    def linked(piece: re.Match[str]) -> str:
        word = piece["word"]
        if not word or word in seen:
            return piece[0]
        seen.add(word)
        return f"[{piece[0]}]({glossary}#{word.replace(' ', '-')})"

    return re.sub(
        rf"{AS_IT_IS.pattern}|(?<![\w-])(?P<word>{'|'.join(words)})s?(?![\w-])",
        linked,
        markdown,
        flags=AS_IT_IS.flags,
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 (mkdocs gives them by name)
    """Lead docstrings to the pages that they name."""
    if dirname(page.file.src_uri) != "api":
        return html
    return NAMED.sub(lambda named: f'<a href="../../{named[1]}/{named[2] or ""}">{named[0]}</a>', html)


def on_env(env: jinja2.Environment, config: MkDocsConfig, files: Files) -> jinja2.Environment:
    """Write llms.txt, which lists the pages for users in their order, and llms-full.txt, which has their whole text."""
    first = files.get_file_from_path("index.md")
    if first is None or first.page is None:
        return env
    title = f"# {config.site_name}\n\n> {config.site_description}"
    listed, whole, section = [title], [title], ""
    for page in following(first.page):
        if page.file.src_uri.startswith(NOT_FOR_ASSISTANTS) or not page.markdown:
            continue
        parents = list(page.ancestors)
        if parents and parents[-1].title != section:
            section = parents[-1].title or ""
            listed.append(f"\n## {section}\n")
        listed.append(f"- [{page.title}]({page.canonical_url}): {first_sentence(page.markdown)}")
        whole.append(page.markdown)
    site = Path(config.site_dir)
    site.mkdir(parents=True, exist_ok=True)
    (site / "llms.txt").write_text("\n".join(listed) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n".join(whole) + "\n", encoding="utf-8")
    return env


def following(page: Page | None) -> Iterator[Page]:
    """Yield the page and all that come behind it in the navigation."""
    while page is not None:
        yield page
        page = page.next_page


def first_sentence(markdown: str) -> str:
    """Return the first sentence of the first paragraph of prose, without links."""
    for paragraph in re.split(r"\n\s*\n", markdown):
        if re.match(r"(?!```)[A-Za-z`*\[]", paragraph):
            text = re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.:])\s", text)[0].rstrip(":")
    return ""
