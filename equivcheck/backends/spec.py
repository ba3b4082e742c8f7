r"""The text that names a backend: `NAME[:ARG,ARG...][@python=PATH][@ssh=[USER@]HOST[:PORT]]`.

ARG is KEY=VALUE, or one bare VALUE where the backend takes one. A VALUE that holds `,`, `@` or `"` is double-quoted, with
`\"` and `\\` inside. `str(parse(text))` gives the text back in canonical form, which parses to the same Spec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from equivcheck.errors import SpecError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*(?==)")
_TRANSPORTS = ("python", "ssh")


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed SPEC. `positional` is the bare VALUE, if there was one; `options` keep their order."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    positional: str | None = None
    python: str | None = None
    ssh: str | None = None

    def __str__(self) -> str:
        arguments = [] if self.positional is None else [_quote(self.positional, bare=True)]
        arguments += [f"{key}={_quote(value)}" for key, value in self.options.items()]
        text = self.name + (":" + ",".join(arguments) if arguments else "")
        if self.ssh is not None:
            text += f"@ssh={self.ssh}"
        if self.python is not None:
            text += f"@python={_quote(self.python)}"
        return text


def parse(text: str) -> Spec:
    """Parse a SPEC.

    Raises SpecError, which points at the column where it stopped making sense.
    """
    return _Parser(text).parse()


def _quote(value: str, *, bare: bool = False) -> str:
    needs = value == "" or any(c in value for c in ',@"\\') or (bare and "=" in value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if needs else value


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def parse(self) -> Spec:
        name = _NAME.match(self.text)
        if name is None:
            raise self.error("expected the name of a backend", "for example: ort, vnpu:profile=exact")
        self.at = name.end()
        options: dict[str, str] = {}
        positional: str | None = None
        if self.peek(":"):
            positional = self.arguments(options)
        transports = self.transports()
        if self.at < len(self.text):
            raise self.error("expected ':', ',' or '@'", "quote a value that holds , or @")
        return Spec(name.group(), options, positional, **transports)

    def peek(self, mark: str) -> bool:
        return self.text.startswith(mark, self.at)

    def arguments(self, options: dict[str, str]) -> str | None:
        positional: str | None = None
        while self.peek(":") or self.peek(","):
            self.at += 1
            key = _KEY.match(self.text, self.at)
            if key is None:
                if positional is not None:
                    raise self.error("a second value without a name", "write it KEY=VALUE")
                positional = self.value()
                if positional == "" and self.text[self.at - 1 : self.at] != '"':
                    raise self.error("expected KEY=VALUE", "drop the stray ':' or ','")
                continue
            self.at = key.end() + 1
            if key.group() in options:
                raise self.error(f"option '{key.group()}' twice", "give it once")
            options[key.group()] = self.value()
        return positional

    def value(self) -> str:
        if not self.peek('"'):
            end = min(
                (k for k in (self.text.find(",", self.at), self.text.find("@", self.at)) if k >= 0),
                default=len(self.text),
            )
            value, self.at = self.text[self.at : end], end
            return value
        self.at += 1
        value = ""
        while not self.peek('"'):
            if self.at >= len(self.text):
                raise self.error("a double quote that is never closed", 'close it with "')
            if self.peek("\\"):
                self.at += 1
            value += self.text[self.at : self.at + 1]
            self.at += 1
        self.at += 1
        return value

    def transports(self) -> dict[str, str]:
        found: dict[str, str] = {}
        while self.peek("@"):
            self.at += 1
            key = next((t for t in _TRANSPORTS if self.text.startswith(f"{t}=", self.at)), None)
            if key is None:
                raise self.error("after '@' expected python= or ssh=", "for example: ort@python=/opt/other/bin/python")
            if key in found:
                raise self.error(f"@{key}= twice", "give it once")
            self.at += len(key) + 1
            found[key] = self.host() if key == "ssh" else self.value()
            if not found[key]:
                raise self.error(f"@{key}= is empty", "say where")
        return found

    def host(self) -> str:
        """[USER@]HOST[:PORT]: the one value in which an '@' is its own."""
        match = re.compile(r"(?:[^@,\s]+@(?!python=|ssh=))?[^@,\s]+").match(self.text, self.at)
        if match is None:
            raise self.error("expected [USER@]HOST[:PORT]", "for example: @ssh=root@imx8")
        self.at = match.end()
        return match.group()

    def error(self, problem: str, hint: str) -> SpecError:
        return SpecError(f"backend '{self.text}', column {self.at + 1}: {problem}", asked=self.text, hint=hint)
