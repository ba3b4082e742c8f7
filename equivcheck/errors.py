"""Every error equivcheck raises on purpose, in one tree.

::

    EquivcheckError                what went wrong, in one line, with the way out       exit 2
     +-- ModelError                a model that cannot be read, or not as asked
     |    +-- SelectorError        a --split-at that selects nothing, or too much
     |    +-- UnsupportedModel     readable, but outside of what this operation can do (ConvertError: no TFLite form)
     +-- InputError                feeds: missing, misnamed, misshapen, not finite
     |    +-- RecipeError          a preprocessing recipe that does not parse or fit
     +-- SpecError                 a backend SPEC that does not parse
     |    +-- UnknownBackend       no such backend here
     |    +-- UnknownOption        the backend is here, but not that option
     |    +-- BackendUnavailable   known, but it cannot run here (with the reason)
     +-- ToleranceError            a tolerance file or preset that does not parse
     +-- RecordingError            a recording that cannot be read
     +-- OutputError               a result that could not be written
    EngineError                    an engine refused, crashed or hung: not the user's mistake    exit 3
     +-- EngineRefused             it would not load or run this model
     +-- EngineCrashed             its process died
     +-- EngineTimeout             it did not answer in time
    Inconclusive                   a run without a verdict, where a caller asked for one (pytest)

An `EquivcheckError` carries what was `asked`, what was `found` and the `nearest` alternatives as fields; its text says the
same. Anything else that escapes is a bug of ours and still exits 2, never 1: exit 1 is reserved for "the tensors differ".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class EquivcheckError(Exception):
    """A mistake the user can mend: `str()` is one line that ends with the way out."""

    def __init__(
        self,
        message: str,
        *,
        asked: str | None = None,
        found: str | None = None,
        nearest: Sequence[str] = (),
        hint: str | None = None,
    ) -> None:
        self.message = message
        self.asked = asked
        self.found = found
        self.nearest = tuple(nearest)
        self.hint = hint
        super().__init__(self._text())

    def _text(self) -> str:
        parts = [self.message]
        if self.nearest:
            parts.append("nearest: " + ", ".join(self.nearest))
        if self.hint:
            parts.append(self.hint)
        return "; ".join(parts)


class ModelError(EquivcheckError):
    """A model file that cannot be read, or that does not hold what was asked of it."""


class SelectorError(ModelError):
    """A selector that matches nothing, or different things under one name."""


class UnsupportedModel(ModelError):
    """A valid model that this operation cannot handle."""


class InputError(EquivcheckError):
    """Feeds that are missing, misnamed, of the wrong shape or dtype, or not finite."""


class RecipeError(InputError):
    """A preprocessing recipe that does not parse, or does not fit the input."""


class SpecError(EquivcheckError):
    """A backend SPEC that does not parse."""


class UnknownBackend(SpecError):
    """No backend of that name is registered."""


class UnknownOption(SpecError):
    """The backend exists; the option does not, or its value is not one of the allowed."""


class BackendUnavailable(SpecError):
    """The backend is known but cannot run here; the text says why and how to install it."""


class ToleranceError(EquivcheckError):
    """A tolerance file or preset that cannot be understood; the text names the key's path."""


class RecordingError(EquivcheckError):
    """A recording on disk that cannot be read."""


class OutputError(EquivcheckError):
    """A result that could not be written; nothing half-written is left behind."""


class EngineError(Exception):
    """An engine failed on a valid request. The run is inconclusive, not the user's mistake."""

    def __init__(self, message: str, *, last_words: str = "") -> None:
        self.message = message
        self.last_words = last_words
        super().__init__(f"{message}: {last_words}" if last_words else message)


class EngineRefused(EngineError):
    """The engine would not load or run this model; `last_words` are its own."""


class EngineCrashed(EngineError):
    """The engine's process died (signal, abort)."""


class EngineTimeout(EngineError):
    """The engine did not answer within its time limit."""


class Inconclusive(Exception):
    """A run ended without a verdict. Deliberately no AssertionError: nothing was shown to differ."""


def near(asked: str, names: Iterable[str], n: int = 3) -> list[str]:
    """Return up to `n` of `names` that look like `asked`, best first; case does not count."""
    folded = {name.casefold(): name for name in names}
    return [folded[hit] for hit in difflib.get_close_matches(asked.casefold(), folded, n=n, cutoff=0.5)]
