"""A page in a real browser, opened without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MARKS = """(figure, prefix) => {
  const found = [];
  const walk = (node) => {
    if (node.marktype === "symbol" && (node.name ?? "").startsWith(prefix)) {
      for (const item of node.items) found.push(item.datum);
    } else for (const child of node.items ?? []) walk(child);
  };
  walk(views[figure].scenegraph().root);
  return found;
}"""
"""The data of the points drawn in the views whose name begins with a prefix."""


class Tab:
    """A page opened without a network, which notes what goes wrong on it."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.context = browser.new_context(offline=True, **context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-drawn=yes]", state="attached")

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def marks(self, figure: str, prefix: str) -> list[dict[str, Any]]:
        walk = f"([figure, prefix]) => ({MARKS})(figure, prefix)"
        found: list[dict[str, Any]] = self.page.evaluate(walk, [figure, prefix])
        return found
