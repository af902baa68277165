"""A drawing of the report as a picture that stands alone, for pages whose style is not ours."""

from __future__ import annotations

import base64

# A white card in every theme: an embedded picture cannot know which one the page around it has chosen.
STYLE = """
svg{background:#fff;font:11px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.grid{stroke:#eceef0}.tick,.axis,.level-label,.mark-label{fill:#5b6470}.row-label{fill:#1c2024;font-size:12px}
.level{stroke:#8a94a0;stroke-dasharray:4 3}.level-label{paint-order:stroke;stroke:#fff;stroke-width:3px}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.line.faint{stroke-width:1;opacity:.28}
.line.train{stroke:#3b5bdb}.line.validation{stroke:#0f9d7a}.line.sft{stroke:#2f6fde}.line.rlhf{stroke:#d9730d}
.dot.train{fill:#3b5bdb}.dot.validation{fill:#0f9d7a}.dot.sft{fill:#2f6fde}.dot.rlhf{fill:#d9730d}
"""


def data_uri(svg: str) -> str:
    """`data:image/svg+xml;base64,…` of an inline drawing of `evaluation.page.plots`."""
    alone = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = alone.partition(">")
    whole = f"{head}><style>{STYLE}</style>{rest}"
    return "data:image/svg+xml;base64," + base64.b64encode(whole.encode()).decode()
