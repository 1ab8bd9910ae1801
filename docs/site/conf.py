"""Settings of the documentation site: `make docs`. Pages are the Markdown files of the repository, where they are."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

# Both are beside this file.
from arguments import describe_arguments  # noqa: E402
from generated_pages import write_generated_pages  # noqa: E402

from aqnpipe import __version__  # noqa: E402

project = "aqnpipe"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/site/index"
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md", "config/*.md", "benchmarks/*.md"]
html_title = f"aqnpipe {version}"
html_theme_options = {
    "description": f"noise-robust post-training, with measured receipts. Version {version}",
    "fixed_sidebar": True,
}
# A page at the root of the site that leads to the first one, and the style of the navigation on a phone.
html_extra_path = ["root"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = False
html_copy_source = False
# A summary of results is the end of a page that a study writes.
suppress_warnings = ["myst.header"]
# Headings have the addresses that GitHub gives them.
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
# Docstrings have code in single backticks.
default_role = "code"

_FOLDER_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)\)")


def _without_folder_links(app, name, source):
    """Show links to folders as text: GitHub lists a folder, a site has no page of it."""
    page = (ROOT / name).parent
    source[0] = _FOLDER_LINK.sub(lambda link: link[1] if (page / link[2]).is_dir() else link[0], source[0])


def setup(app):
    """Write the generated pages before Sphinx looks for pages."""
    write_generated_pages(Path(app.srcdir) / "docs" / "site" / "generated", ROOT)
    app.connect("source-read", _without_folder_links)
    app.connect("autodoc-process-docstring", describe_arguments)
