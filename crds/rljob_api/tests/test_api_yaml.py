"""YAML that means the same to every reader, or is refused."""

from __future__ import annotations

import pytest

from rljob_api.load import LoadError, load_documents


@pytest.mark.parametrize(
    ("scalar", "want"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("1.0.0", "1.0.0"),
        ("0.5.16", "0.5.16"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("y", "y"),
        ('"no"', "no"),
        ('"012"', "012"),
        ("'1e-6'", "1e-6"),
        ("10.0.0.1:6379", "10.0.0.1:6379"),
        ("fd00::1", "fd00::1"),
        ("1:a", "1:a"),
    ],
)
def test_scalars_are_those_of_kubernetes(scalar: str, want: object) -> None:
    value = load_documents(f"key: {scalar}\nother: 1")[0]["key"]
    assert value == want
    assert type(value) is type(want)


@pytest.mark.parametrize(
    "scalar", ["no", "Yes", "on", "OFF", "012", "08", "1_000", "0x1F", "0o17", "0b1", "1:30", "-1:30:00", "1_0.5"]
)
def test_ambiguous_scalars_are_refused_with_their_place_and_a_way_out(scalar: str) -> None:
    with pytest.raises(LoadError) as caught:
        load_documents(f"a: 1\nkey: {scalar}")
    assert str(caught.value).startswith("line 2, column 6: ")
    assert f'quote it: "{scalar}"' in str(caught.value)


def test_an_ambiguous_key_is_refused() -> None:
    with pytest.raises(LoadError, match="line 1, column 1: no means different things"):
        load_documents("no: 16")


@pytest.mark.parametrize("scalar", [".nan", ".inf", "-.Inf", "1e999"])
def test_numbers_that_are_not_json_are_refused(scalar: str) -> None:
    with pytest.raises(LoadError, match="line 1, column 6"):
        load_documents(f"key: {scalar}")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a: 1\nb: 2\na: 3", r"line 3, column 1: key 'a' is there twice \(first on line 1\)"),
        ("a:\n  b: 1\n  b: 2", "line 3, column 3: key 'b' is there twice"),
        ("1: x", "key '1' is not text"),
        ("true: x", "key 'true' is not text"),
        ("a: [1, 2", "not YAML"),
        ("a: b: c", "line 1, column 5: not YAML"),
        ("- a\n- b", "document 1 is list, not a mapping"),
        ("a: 1\n---\njust text", "document 2 is str"),
        ("a: !!python/object:os.system x", "not YAML"),
        ("a: &x [*x]\n--- \nb: \x00", "not YAML"),
    ],
)
def test_bad_documents_are_refused_with_their_place(text: str, want: str) -> None:
    with pytest.raises(LoadError, match=want):
        load_documents(text)


def test_several_documents_and_empty_ones() -> None:
    assert load_documents("---\na: 1\n---\n---\n# nothing\n---\nb: {c: [1, 2]}\n") == [{"a": 1}, {"b": {"c": [1, 2]}}]
    assert load_documents("") == []
    assert load_documents('{"a": 1e-6}') == [{"a": 1e-6}]


def test_merge_keys_are_not_duplicates() -> None:
    text = "base: &base {a: 1, b: 2}\nderived:\n  <<: *base\n  b: 3\n"
    assert load_documents(text)[0]["derived"] == {"a": 1, "b": 3}


def test_other_users_of_pyyaml_are_not_affected() -> None:
    import yaml

    load_documents("a: 1e-6")
    assert yaml.safe_load("a: no") == {"a": False}
    assert yaml.safe_load("a: 1e-6") == {"a": "1e-6"}
