"""Unknown keys: found before validation, with the section, the place, and the key that was probably meant.

A misspelt key that is dropped leaves a default in force that nobody chose, so none is ever dropped. What a key was
meant to be is looked for among the section's keys, the names that other projects use, and the keys of other sections.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from grpo_mc.config.base import Section, shorten
from grpo_mc.config.schema import Config
from grpo_mc.config.strict_yaml import Document, KeyPath

_OTHER_NAMES = {
    "learning_rate": "lr",
    "weight_decay_rate": "weight_decay",
    "max_grad_norm": "clip_grad",
    "adam_eps": "eps",
    "lr_scheduler_type": "schedule",
    "lr_schedule": "schedule",
    "num_warmup_steps": "warmup_steps",
    "max_steps": "steps",
    "num_steps": "steps",
    "train_steps": "steps",
    "output_dir": "dir",
    "run_dir": "dir",
    "run_name": "name",
    "num_generations": "group_size",
    "num_rollouts": "group_size",
    "n_samples_per_prompt": "group_size",
    "max_completion_length": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "batch_size": "prompts_per_step",
    "train_batch_size": "prompts_per_step",
    "num_prompts_per_step": "prompts_per_step",
    "model_name_or_path": "path",
    "model_name": "path",
    "torch_dtype": "dtype",
    "precision": "dtype",
    "epsilon": "clip_low",
    "clip_ratio_low": "clip_low",
    "epsilon_high": "clip_high",
    "clip_ratio_high": "clip_high",
    "clip_ratio_c": "dual_clip",
    "delta": "dual_clip",
    "kl_coef": "beta",
    "kl_beta": "beta",
    "kl_loss_coef": "beta",
    "kl_type": "kl",
    "kl_loss_type": "kl",
    "entropy_coeff": "entropy_coef",
    "loss_type": "loss",
    "loss_agg_mode": "aggregation",
    "num_iterations": "epochs",
    "ppo_epochs": "epochs",
    "scale_rewards": "scale",
    "mask_truncated_completions": "mask_truncated",
    "reward_funcs": "functions",
    "reward_weights": "weight",
    "train_files": "train",
    "dataset": "train",
    "tensor_model_parallel_size": "tp",
    "tensor_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "context_parallel_size": "cp",
    "data_parallel_size": "dp",
    "save_steps": "every",
    "save_freq": "every",
    "eval_steps": "every",
    "save_total_limit": "keep_last",
    "resume_from_checkpoint": "resume",
}
"""Names used elsewhere, and the key that means the same here."""


def section_classes(annotation: Any) -> list[type[Section]]:
    """The section models inside a type annotation, through unions, lists and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for argument in get_args(annotation) for found in section_classes(argument)]


def pick_section(annotation: Any, value: Any) -> type[Section] | None:
    """The section model that a mapping is meant for; of several the one whose `kind` or `type` it names."""
    classes = section_classes(annotation)
    if len(classes) == 1:
        return classes[0]
    for candidate in classes:
        for tag in ("kind", "type"):
            if tag in candidate.model_fields and value.get(tag) in get_args(candidate.model_fields[tag].annotation):
                return candidate
    return None


def unknown_keys(document: Document) -> list[str]:
    """One message for every key in the document that no section has."""
    return [_message(document, path, section) for path, section in _unknown(document.data, Config, ())]


def _unknown(value: dict[str, Any], section: type[Section], path: KeyPath) -> Iterator[tuple[KeyPath, type[Section]]]:
    for key, item in value.items():
        field = section.model_fields.get(key)
        if field is None:
            yield (*path, key), section
            continue
        is_list = get_origin(field.annotation) is list
        parts = list(enumerate(item)) if is_list and isinstance(item, list) else [(None, item)]
        for index, part in parts:
            inner = pick_section(field.annotation, part) if isinstance(part, dict) else None
            if inner is not None:
                yield from _unknown(part, inner, (*path, key) if index is None else (*path, key, index))


def _message(document: Document, path: KeyPath, section: type[Section]) -> str:
    mark = document.mark(path)
    place = f"{mark.place}: " if mark else ""
    where = f"in section '{'.'.join(map(str, path[:-1]))}'" if len(path) > 1 else "at the top level"
    return f"{place}unknown key '{shorten(str(path[-1]))}' {where}; {suggest(str(path[-1]), section)}"


def suggest(key: str, section: type[Section]) -> str:
    """What was probably meant: a key of the same section, else one of another, else the whole list."""
    own = list(section.model_fields)
    here, here_score = _nearest(key, own)
    there: list[str] = []
    there_score = 0.0
    for name, field in Config.model_fields.items():
        (candidate_section,) = section_classes(field.annotation)
        if candidate_section is section:
            continue
        candidate, score = _nearest(key, list(candidate_section.model_fields))
        if candidate is not None and score > there_score:
            there, there_score = [], score
        if candidate is not None and score == there_score:
            there.append(f"{name}.{candidate}")
    if here is not None and here_score >= there_score:
        return f"did you mean '{here}'?"
    if there:
        exact = there_score == 1.0 and there[0].endswith("." + key)
        names = " or ".join(f"'{name}'" for name in there)
        return f"it belongs in another section: {names}" if exact else f"did you mean {names}?"
    return f"valid keys: {', '.join(own)}"


def _nearest(key: str, names: list[str]) -> tuple[str | None, float]:
    """The name most like the key, and how like it is (0 to 1); (None, 0) when none is."""
    plain = key.lower().replace("-", "_").replace(" ", "_")
    spellings = {name: name for name in names}
    spellings |= {other: name for other, name in _OTHER_NAMES.items() if name in names and other not in names}
    near = difflib.get_close_matches(plain, spellings, n=1, cutoff=0.7)
    if not near:
        return None, 0.0
    return spellings[near[0]], difflib.SequenceMatcher(None, plain, near[0]).ratio()
