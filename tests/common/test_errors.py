import pytest

from keras_tpu_dist.common.errors import did_you_mean, message


def test_message_has_rule_received_and_fix_in_this_order():
    text = message("Rule.", received={"axis": "dta"}, fix="Fix.", name="dta", choices=["data"])
    assert text == "Rule. Received: axis='dta'. Fix. Did you mean 'data'?"


def test_received_may_be_a_sentence():
    assert (
        message("Rule.", received="a sentence.", fix="Fix.") == "Rule. Received: a sentence. Fix."
    )


@pytest.mark.parametrize(
    ("name", "choices", "hint"),
    [
        ("modle", ["data", "model"], " Did you mean 'model'?"),
        ("DATA", ["data", "model"], " Did you mean 'data'?"),
        ("zzz", ["data", "model"], ""),
        ("data", [], ""),
    ],
)
def test_did_you_mean(name, choices, hint):
    assert did_you_mean(name, choices) == hint
