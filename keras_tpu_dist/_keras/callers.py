"""Which functions of Keras call the names that are replaced, and whether new ones do.

A replacement may rely on who does not call a name: only the user calls `set_distribution(None)` in
Keras 3.15, which turns a strategy off; in Keras 3.16 `clear_session` does, too. No name is missing
then. So the callers that were read are declared here, by their names, and compared with the source
of a Keras that the tests did not run with.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

# Of other backends, and what calls Keras as users do.
_LEFT_OUT = {"applications", "numpy", "openvino", "tensorflow", "torch"}

# Name: the functions of Keras 3.15 that call it, and those of Keras 3.16 that were read since:
# `clear_session` calls `set_distribution`, which `active` sees; `_distributed_iterator` is another
# name of `_get_distributed_iterator`.
CALLERS: dict[str, str] = {
    "_backend_apply_gradients": "apply",
    "_backend_update_step": "_backend_apply_gradients _backend_update_step _update_step_fn",
    "_compute_attention": "call",
    "_distribute_data": (
        "_distributed_iterator _get_distributed_iterator _one_batch_ahead_iterator data"
    ),
    "_get_h5_file": "__init__ _create_new_shard_file _switch_h5_file get",
    "_get_jax_state": "evaluate fit predict predict_on_batch test_on_batch train_on_batch",
    "_get_state_sharding_spec": "make_predict_function make_test_function make_train_function",
    "_initialize_layout": "_initialize _initialize_with_initializer",
    "_load_model_from_orbax_checkpoint": "load_model",
    "_make_function": "make_predict_function make_test_function make_train_function",
    "_maybe_build": "__call__",
    "_retrieve_class_or_fn": "deserialize_keras_object",
    "_swap_variables": (
        "on_epoch_begin on_epoch_end on_predict_begin on_predict_end on_test_begin on_test_end"
    ),
    "add_update": "assign",
    "apply": (
        "_check_params _filter_classes _filter_valid_filepaths _stateful_handle_finite_grads "
        "apply apply_gradients apply_with_training apply_without_training stateless_apply"
    ),
    "clear_session": "setUp",
    "compile": (
        "compile compile_from_config exclude_from_weight_decay load_model_from_hdf5 "
        "run_training_step"
    ),
    "compute_loss_and_updates": "test_step",
    "distribute_tensor": "__call__ _direct_assign distribute_tensor",
    "dot_product_attention": "_compute_attention call dot_product_attention",
    "evaluate": "fit",
    "finalize_variable_values": "finalize_variable_values fit",
    "fit": "_process_target fit run_training_step",
    "get_build_and_compile_config": "serialize_keras_object",
    "get_current_value": (
        "_get_regularization_losses _stateless_handle_non_finite_grads "
        "_update_metrics_variables increment stateless_apply stateless_call "
        "stateless_compute_loss stateless_fn stateless_reset_state stateless_update_state "
        "upscale value"
    ),
    "get_metrics_result": "_get_metrics_result_or_logs compute_metrics",
    "get_weights": "on_epoch_end",
    "is_memory_sufficient": "_load_model_from_fileobj _save_model_to_fileobj",
    "jax_state_sync": "evaluate fit model predict predict_on_batch test_on_batch train_on_batch",
    "load_weights": "_load_model load_weights",
    "next": "_get_call_seed draw_seed",
    "predict": "decision_function predict transform",
    "predict_on_batch": "",
    "save_model": "save save_model",
    "save_model_to_hdf5": "save_model",
    "save_weights_only": "save_weights",
    "set_distribution": "clear_session scope",
    "set_global_attribute": (
        "__enter__ __exit__ _get_call_context _maybe_reset_call_context "
        "disable_flash_attention disable_interactive_logging disable_traceback_filtering "
        "enable_flash_attention enable_interactive_logging enable_traceback_filtering "
        "enable_unsafe_deserialization get_attr_skipset get_global_attribute "
        "global_seed_generator initialize_all_variables keras_option_scope reset_uids "
        "set_distribution set_dtype_policy set_nnx_enabled set_random_seed set_tensor_attr"
    ),
    "set_weights": "__init__ load_model_from_hdf5 on_train_end set_weights",
    "stateless_call": "compute_loss_and_updates predict_step",
    "test_on_batch": "",
    "train_on_batch": "",
    "zeropower_via_newtonschulz5": "_muon_update_step",
}


def new_callers(folder: Path | None = None) -> list[str]:
    """Functions of Keras that call a name, and are not declared: a sentence for each.

    Args:
        folder: The source, `keras/src`; by default that of this Keras.
    """
    if folder is None:
        spec = importlib.util.find_spec("keras.src")
        folder = Path((spec and spec.origin) or "").parent
    found = callers_in(folder, tuple(CALLERS))
    return [
        f"{caller or 'a module'} calls {name}"
        for name, declared in CALLERS.items()
        for caller in sorted(found.get(name, set()) - set(declared.split()))
    ]


def callers_in(folder: Path, names: tuple[str, ...]) -> dict[str, set[str]]:
    """Which functions call names, by name; `""` for code outside of functions.

    Args:
        folder: The source of Keras, `keras/src`.
        names: The names.
    """
    mentioned = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).parts
        if path.name.endswith("_test.py") or _LEFT_OUT.intersection(inside):
            continue
        text = path.read_text(errors="replace")
        if mentioned.search(text):
            for name, caller in _calls(ast.parse(text), ""):
                if name in names:
                    found.setdefault(name, set()).add(caller)
    return found


def _calls(node: ast.AST, inside: str) -> Iterator[tuple[str, str]]:
    """Names that are called, and the functions that call them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield from _calls(child, child.name)
            continue
        if isinstance(child, ast.Call):
            function = child.func
            if isinstance(function, ast.Attribute):
                yield function.attr, inside
            elif isinstance(function, ast.Name) and function.id != "next":  # Python's own
                yield function.id, inside
        yield from _calls(child, inside)
