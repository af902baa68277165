"""Writes the JSON schema that editors check config files against.

python -m flows.config.schema > configs/schema.json
"""

from __future__ import annotations

import json
import sys

from flows.config.read import PipelineConfig


def schema() -> str:
    """The schema of a pipeline's YAML file, as committed in configs/schema.json."""
    content = PipelineConfig.model_json_schema(by_alias=True)
    content["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema())
