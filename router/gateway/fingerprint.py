"""`system_fingerprint`: equal for equal model, version and configuration of what shapes an answer."""

import hashlib
import json
from functools import lru_cache

from twostroke import __version__
from twostroke.router.request import ServedModel


def system_fingerprint(model: ServedModel, default_max_tokens: int, template: str) -> str:
    """The same on every router of a deployment. `template` is the version of the prompt templates, if any."""
    return _fingerprint(model.name, model.fingerprint, model.max_context, model.page_size, default_max_tokens, template)


@lru_cache(maxsize=64)
def _fingerprint(*facts: str | int) -> str:
    digest = hashlib.blake2b(json.dumps([__version__, *facts]).encode(), digest_size=5)
    return f"fp_{digest.hexdigest()}"
