import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scriptdispatch.domain.render import MissingParam, placeholders, render


@pytest.mark.parametrize("content", ["echo {{ name }}", "echo {{name}}", "echo {{   name}}", "echo {{name }}"])
def test_a_placeholder_is_filled_whatever_the_spaces(content: str) -> None:
    assert render(content, {"name": "x"}) == "echo x"


@pytest.mark.parametrize("content", ["echo {{ name|quote }}", "echo {{name|quote}}", "echo {{ name | quote }}"])
def test_quote_makes_one_word_of_it_for_the_shell(content: str) -> None:
    assert render(content, {"name": "a b; rm -rf /"}) == "echo 'a b; rm -rf /'"


@given(st.text())
def test_quoted_text_reaches_the_shell_as_it_is(text: str) -> None:
    assert shlex.split(render("echo {{ text|quote }}", {"text": text})) == ["echo", text]


@given(st.text())
def test_without_params_the_content_is_left_as_it_is(content: str) -> None:
    assert render(content, None) == content


@pytest.mark.parametrize(
    "content",
    [
        "{{ 1st }}",
        "{{ a.b }}",
        "{{ a|upper }}",
        "{{ a-b }}",
        "{{}}",
        "{{ }}",
        "{ name }",
        "{% if x %}",
        "${{ a b }}",
        "{{ é }}",
    ],
)
def test_what_is_no_placeholder_is_left_alone_even_with_params(content: str) -> None:
    assert render(content, {"a": "x", "name": "x"}) == content
    assert placeholders(content) == []


def test_a_name_without_a_param_is_an_error_that_names_it() -> None:
    with pytest.raises(MissingParam) as caught:
        render("echo {{ service }}", {"servce": "x"})
    assert caught.value.name == "service"
    assert "'service'" in str(caught.value)


def test_empty_params_still_ask_for_rendering() -> None:
    with pytest.raises(MissingParam):
        render("echo {{ service }}", {})


def test_a_value_that_looks_like_a_placeholder_is_not_filled_again() -> None:
    assert render("echo {{ a }}", {"a": "{{ b }}", "b": "secret"}) == "echo {{ b }}"


@pytest.mark.parametrize(
    ("value", "text"),
    [(8080, "8080"), (True, "true"), (None, "null"), (1.5, "1.5"), ([1, "a"], '[1,"a"]'), ({"k": 1}, '{"k":1}')],
)
def test_a_value_that_is_no_text_appears_as_json(value: object, text: str) -> None:
    assert render("{{ v }}", {"v": value}) == text


def test_placeholders_are_listed_once_in_order_of_appearance() -> None:
    assert placeholders("{{ b }} {{ a|quote }} {{ b }} {{ c.d }}") == ["b", "a"]
