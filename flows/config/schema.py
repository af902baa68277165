"""Writes the JSON schema that editors check config files against.

python -m flows.config.schema > configs/schema.json
"""

from __future__ import annotations

import json
import sys

from flows.config.extends import EXTENDS
from flows.config.read import PipelineConfig


def schema() -> str:
    """The schema of a pipeline's YAML file, as committed in configs/schema.json."""
    content = PipelineConfig.model_json_schema(by_alias=True)
    key = {"type": "string", "minLength": 1}
    keys = {"config": key, "without": {"type": "array", "items": key}}
    request = {"type": "object", "properties": keys, "required": ["config"], "additionalProperties": False}
    content["properties"][EXTENDS] = {
        "anyOf": [key, request],
        "description": "Another config, whose keys this file changes: a path relative to this file. `without` lists "
        "dotted keys of it that are left out.",
    }
    # Which keys a file has to have is known when it is merged with the file that it extends.
    content["anyOf"] = [{"required": content.pop("required")}, {"required": [EXTENDS]}]
    content["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema())
