"""`--set path=value` on documents."""

import copy

import pytest

from rljob_operator.cli.overrides import OverrideError, apply_overrides


@pytest.mark.parametrize(
    ("override", "want"),
    [
        ("rollout.engine=Native", {"rollout": {"engine": "Native"}, "list": [1, {"a": 2}]}),
        ("spec.rollout.engine=Native", {"rollout": {"engine": "Native"}, "list": [1, {"a": 2}]}),
        ("rollout.topP=1e-1", {"rollout": {"engine": "SGLang", "topP": 0.1}, "list": [1, {"a": 2}]}),
        (
            "training.offload.optimizer=true",
            {**{"rollout": {"engine": "SGLang"}, "list": [1, {"a": 2}]}, "training": {"offload": {"optimizer": True}}},
        ),
        ("rollout=null", {"list": [1, {"a": 2}]}),
        ("rollout.missing=null", {"rollout": {"engine": "SGLang"}, "list": [1, {"a": 2}]}),
        ("list[0]=7", {"rollout": {"engine": "SGLang"}, "list": [7, {"a": 2}]}),
        ("list[1].a=7", {"rollout": {"engine": "SGLang"}, "list": [1, {"a": 7}]}),
        ("list[2]=7", {"rollout": {"engine": "SGLang"}, "list": [1, {"a": 2}, 7]}),
        ("list[2].b=7", {"rollout": {"engine": "SGLang"}, "list": [1, {"a": 2}, {"b": 7}]}),
        ("list[0]=null", {"rollout": {"engine": "SGLang"}, "list": [{"a": 2}]}),
        ("list=[x, y]", {"rollout": {"engine": "SGLang"}, "list": ["x", "y"]}),
        ("new[0].x=1", {"rollout": {"engine": "SGLang"}, "list": [1, {"a": 2}], "new": [{"x": 1}]}),
        ("model.source=a=b", {"rollout": {"engine": "SGLang"}, "list": [1, {"a": 2}], "model": {"source": "a=b"}}),
    ],
)
def test_override(override, want):
    document = {"spec": {"rollout": {"engine": "SGLang"}, "list": [1, {"a": 2}]}}
    before = copy.deepcopy(document)
    assert apply_overrides(document, (override,)) == {"spec": want}
    assert document == before


def test_metadata_is_reached_by_its_own_name():
    assert apply_overrides({"metadata": {"name": "a"}}, ("metadata.name=b",)) == {"metadata": {"name": "b"}}


def test_later_overrides_see_earlier_ones():
    assert apply_overrides({}, ("list[0]=1", "list[1]=2", "list[0]=3")) == {"spec": {"list": [3, 2]}}


@pytest.mark.parametrize("override", ["list[3]=1", "list[9].a=1", "list[0].a=1", "rollout.engine.x=1", "list.a=null"])
def test_what_does_not_fit_is_refused(override):
    with pytest.raises(OverrideError):
        apply_overrides({"spec": {"rollout": {"engine": "SGLang"}, "list": [1, {"a": 2}]}}, (override,))


def test_deleting_behind_the_end_is_refused():
    with pytest.raises(OverrideError, match="the largest index here is 1"):
        apply_overrides({"spec": {"list": [1, 2]}}, ("list[2]=null",))
