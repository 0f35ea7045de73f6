import pytest

from keras_tpu_dist.common.error_ids import identifier
from keras_tpu_dist.common.errors import did_you_mean, message


def test_message_has_rule_received_and_fix_in_this_order():
    text = message("Rule.", received={"axis": "dta"}, fix="Fix.", name="dta", choices=["data"])
    assert text == "Rule. Received: axis='dta'. Fix. Did you mean 'data'? [ktd e5d819b71]"


def test_received_may_be_a_sentence():
    assert message("Rule.", received="a sentence.", fix="Fix.") == (
        "Rule. Received: a sentence. Fix. [ktd e5d819b71]"
    )


def test_the_id_is_that_of_the_words_which_stay():
    texts = [
        message(f"A dimension of {size} is split by {axis!r}.", received={}, fix="Fix.")
        for size, axis in ((3, "data"), (5, "model"))
    ]
    assert len({text[-15:] for text in texts}) == 1
    assert texts[0].endswith(f"[ktd {identifier('A dimension of … is split by ….')}]")


def test_without_a_source_or_a_rule_there_is_no_id():
    assert eval('message("Rule.", received="a.", fix="Fix.")') == "Rule. Received: a. Fix."
    rule = "Rule."
    assert message(rule, received="a.", fix="Fix.") == "Rule. Received: a. Fix."


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
