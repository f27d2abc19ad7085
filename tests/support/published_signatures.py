"""What public calls take. As a script, run by the published client's Python: those of its package, as JSON."""

import inspect
import json
from typing import Any

CLASSES = ("PionPromptCache", "HybridRetrievalCache", "PionPrefixCache")
FUNCTIONS = (
    "install_pion_attention_patch", "uninstall_pion_attention_patch", "make_pion_prompt_cache", "mlx_lm_seam_report",
)  # fmt: skip


def positional(call: Any) -> list[list[str]]:
    """[name, default] of each parameter that may be given by position; no default: an empty text."""
    return [
        [each.name, "" if each.default is each.empty else repr(each.default)]
        for each in inspect.signature(call).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]


def published() -> dict[str, list[list[str]]]:
    """The parameters of every public function, class and method of the published client, by dotted name."""
    import pion_vllm_mlx as package

    calls: dict[str, Any] = {name: getattr(package, name) for name in (*FUNCTIONS, *CLASSES)}
    for owner in CLASSES:
        for name, member in vars(calls[owner]).items():
            if not name.startswith("_") and inspect.isfunction(member):
                calls[f"{owner}.{name}"] = member
    return {name: positional(call) for name, call in calls.items()}


if __name__ == "__main__":
    print(json.dumps(published()))
