"""Tests of Keras's own that fail under a `TPUStrategy`, and why that is right.

A key is a test's id, or the beginning of ids followed by `*`.
"""

EXCEPTIONS: dict[str, str] = {
    # trainers
    "trainers/trainer_test.py::TestTrainer::test_fit_eval_flow_for_jax_model_weights": (
        "Asserts that variables hold no value while fit runs (`_value is None`); ours keep the"
        " weights of the last completed step, so that a failure loses nothing."
    ),
    "trainers/trainer_test.py::TestTrainer::"
    "test_steps_per_execution_steps_per_epoch_match_multi_epoch*": (
        "Counts launches: Keras makes 6 and then 4 steps of two epochs of 5, by twos; ours ends"
        " the launch with the epoch, 5 steps each in 3 launches."
    ),
    # layers
    "layers/preprocessing/mel_spectrogram_test.py::MelSpectrogramTest::"
    "test_mel_spectrogram_basics": (
        "Trains on a batch of one sound of 16,000 samples without a batch axis, whose target has 80"
        " rows: a mesh splits rows, so that ours asks for as many of each."
    ),
}


def reason(test: str) -> str | None:
    """Why a test may fail; `None` if it may not."""
    for key, words in EXCEPTIONS.items():
        if test == key or (key.endswith("*") and test.startswith(key[:-1])):
            return words
    return None
