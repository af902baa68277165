"""Settings of the site that `make docs` builds from docs/, benchmarks/ and the files of the project's root."""

project = "Stemma"
author = "the Stemma authors"
copyright = author

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/**/*.md",
    "benchmarks/RESULTS.md",
    "benchmarks/log/*.md",
    "benchmarks/log/**/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "AGENTS.md",
    "tests/README.md",
]
exclude_patterns = ["docs/_build", ".venv*", ".git", ".stemma"]
myst_enable_extensions = ["deflist"]
# Links to headings are written as GitHub writes their anchors.
myst_heading_anchors = 4
# Blocks without a language are output of programs; `console` and `jsonl` are taken as they come.
highlight_language = "text"

html_theme = "furo"
html_title = "Stemma"
html_copy_source = False
html_show_sphinx = False
html_extra_path = ["site"]
html_theme_options = {"navigation_with_keys": True}
