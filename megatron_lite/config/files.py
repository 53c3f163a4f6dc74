"""Configuration files: YAML and JSON mappings of field names to values.

PyYAML is imported only when a file is read or printed: it would double the time that
parsing takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.errors import UserError


def read_config_file(path: str) -> dict[Any, Any]:
    """Read the mapping in a `.json` or YAML file.

    Raises:
        UserError: the file is missing, unreadable, or holds no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config-file {path}: cannot be read: {error}") from None
    content = parse_json(path, text) if path.endswith(".json") else parse_yaml(path, text)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config-file {path}: expected a mapping of field names to values")
    return content


def parse_json(path: str, text: str) -> Any:
    """Parse JSON text, naming the place of a fault."""

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check_keys(path, [key for key, _ in pairs])
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=build_object)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--config-file {path}: not JSON: {error}") from None


def check_keys(path: str, keys: list[str]) -> None:
    """Refuse a mapping that has a key more than once: the last one would win unseen."""
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise UserError(f"--config-file {path}: {', '.join(repeated)}: given more than once")


def parse_yaml(path: str, text: str) -> Any:
    """Parse YAML text, naming the place of a fault."""
    import yaml

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            check_keys(path, keys)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"--config-file {path}: not YAML: {' '.join(str(error).split())}") from None


def format_yaml(values: Mapping[str, Any]) -> str:
    """Write a mapping as YAML, in the given order."""
    import yaml

    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
    return str(yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, allow_unicode=True))
