"""Models behind OpenAI's protocol, with a page to chat with two of them side by side.

`app` is the ASGI app, which `stemma serve` runs.
"""

from training.serving.app import app

__all__ = ["app"]
