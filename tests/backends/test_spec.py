"""SPEC = NAME [: ARG (, ARG)*] (@python=PATH | @ssh=[USER@]HOST[:PORT])*."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.backends.spec import Spec, parse
from equivcheck.errors import SpecError

TEXTS = [
    ("ort", Spec("ort")),
    ("vnpu:profile=exact,target=all", Spec("vnpu", {"profile": "exact", "target": "all"})),
    (
        "ort:optimization=disable@python=/opt/x/bin/python",
        Spec("ort", {"optimization": "disable"}, python="/opt/x/bin/python"),
    ),
    ("recorded:runs/board 7", Spec("recorded", {}, "runs/board 7")),
    ("script:run_npu.py,timeout=20", Spec("script", {"timeout": "20"}, "run_npu.py")),
    ("script:timeout=20,run_npu.py", Spec("script", {"timeout": "20"}, "run_npu.py")),
    ('recorded:"a,b@c"', Spec("recorded", {}, "a,b@c")),
    ('recorded:"a=b"', Spec("recorded", {}, "a=b")),
    (r'x:key="say \"hi\" \\ bye"', Spec("x", {"key": 'say "hi" \\ bye'})),
    ('x:key=""', Spec("x", {"key": ""})),
    ("x:key=", Spec("x", {"key": ""})),
    ("x:key=a=b", Spec("x", {"key": "a=b"})),
    ("x:C:/run.py", Spec("x", {}, "C:/run.py")),
    ("ort@ssh=imx8", Spec("ort", ssh="imx8")),
    ("ort@ssh=root@imx8:2222", Spec("ort", ssh="root@imx8:2222")),
    ("ort@ssh=root@imx8@python=/usr/bin/python3", Spec("ort", ssh="root@imx8", python="/usr/bin/python3")),
    ("ort@python=/usr/bin/python3@ssh=root@imx8", Spec("ort", ssh="root@imx8", python="/usr/bin/python3")),
    ("ort@ssh=imx8@python=python3", Spec("ort", ssh="imx8", python="python3")),
    ("tflite-runtime_2.x:delegate=/a/b.so", Spec("tflite-runtime_2.x", {"delegate": "/a/b.so"})),
]
# (text, the column the message names or None, a word it says)
BROKEN = [
    ("", 1, "name of a backend"),
    (":x", 1, "name of a backend"),
    ("7up", 1, "name of a backend"),
    ("ort optimization=all", 4, "expected"),
    ("ort:a,b", 7, "second value"),
    ("ort:a=1,a=2", None, "twice"),
    ('ort:a="b', None, "never closed"),
    ('ort:a="b"c', 10, "expected"),
    ("ort@", 5, "python= or ssh="),
    ("ort@docker=x", 5, "python= or ssh="),
    ("ort@python=", None, "empty"),
    ("ort@ssh=", None, "HOST"),
    ("ort@python=a@python=b", None, "twice"),
    ("ort:", None, "KEY=VALUE"),
    ("ort:a=1,", None, "KEY=VALUE"),
    ("ort:,a=1", None, "KEY=VALUE"),
    ("ort@ssh=x@python=y:z=1,w", None, ""),
]


@pytest.mark.parametrize(("text", "spec"), TEXTS)
def test_a_text_means_this_spec(text: str, spec: Spec) -> None:
    assert parse(text) == spec


@pytest.mark.parametrize(("text", "spec"), TEXTS)
def test_its_canonical_form_means_the_same(text: str, spec: Spec) -> None:
    assert parse(str(spec)) == spec
    assert str(parse(str(spec))) == str(spec)


@pytest.mark.parametrize(("text", "column", "word"), BROKEN[:-1])
def test_a_broken_text_is_answered_with_the_column_and_what_was_expected(
    text: str, column: int | None, word: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert caught.value.asked == text
    assert word in str(caught.value)
    assert caught.value.hint
    if column is not None:
        assert f"column {column}:" in str(caught.value)


NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,8}", fullmatch=True)
VALUES = st.text(min_size=0, max_size=20)
HOSTS = st.from_regex(r"([a-z]{1,8}@)?[a-z0-9.-]{1,12}(:[0-9]{1,5})?", fullmatch=True)


@given(
    name=NAMES,
    options=st.dictionaries(NAMES, VALUES, max_size=4),
    positional=st.none() | VALUES,
    python=st.none() | st.text(min_size=1, max_size=20),
    ssh=st.none() | HOSTS,
)
def test_every_spec_survives_being_written_and_read(
    name: str, options: dict[str, str], positional: str | None, python: str | None, ssh: str | None
) -> None:
    spec = Spec(name, options, positional, python, ssh)
    again = parse(str(spec))
    assert again == spec
    assert list(again.options) == list(options)


@given(text=st.text(alphabet=string.ascii_letters + ':,=@"\\ 1/.-', max_size=25))
def test_any_text_is_a_spec_that_round_trips_or_a_spec_error(text: str) -> None:
    try:
        spec = parse(text)
    except SpecError:
        with pytest.raises(SpecError, match="column"):
            parse(text)
    else:
        assert parse(str(spec)) == spec
