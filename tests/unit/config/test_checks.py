"""Checks across sections and of the layout: every message names both fields and both values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grpo_mc.config import (
    ConfigError,
    ModelShape,
    ParallelConfig,
    check_parallel,
    check_trainable,
    config_warnings,
    load_config_text,
    objective_formula,
    resolve,
)

Refusal = Callable[..., str]
SMOLLM2 = ModelShape(
    num_layers=30, num_heads=9, num_kv_heads=3, vocab_size=49152, hidden_size=576, ffn_hidden_size=1536
)
TINY_MOE = ModelShape(num_layers=4, num_heads=4, num_kv_heads=2, vocab_size=256, num_experts=4, moe_ffn_hidden_size=64)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["rollout.group_size=1"], "rollout.group_size is 1 but algorithm.scale is 'std'"),
        (
            ["rollout.group_size=1", "algorithm.scale=none", "algorithm.baseline=leave_one_out"],
            "rollout.group_size is 1 but algorithm.baseline is 'leave_one_out'",
        ),
        (["rollout.group_size=1", "algorithm.preset=nemo_rl"], "algorithm.scale is 'leave_one_out_std'"),
        (
            ["rollout.group_size=1", "algorithm.scale=none", "algorithm.quantile=0.1"],
            "rollout.group_size is 1 but algorithm.quantile is 0.1",
        ),
        (["rollout.group_size=1", "algorithm.scale=none"], "algorithm.baseline is 'mean': every advantage would be 0"),
        (
            ["data.prompts_per_step=8", "algorithm.minibatches=3"],
            "data.prompts_per_step is 8 but algorithm.minibatches is 3",
        ),
        (["optimizer.warmup_steps=4"], "optimizer.warmup_steps is 4 but run.steps is 3"),
        (
            ["algorithm.overlong_buffer=9", "rollout.max_new_tokens=8"],
            "algorithm.overlong_buffer is 9 but rollout.max_new_tokens is 8",
        ),
        (["evaluation.pass_k=[1, 4]"], "evaluation.pass_k has 4 but evaluation.num_samples is 1"),
        (["evaluation.num_samples=2"], "evaluation.num_samples is 2 but evaluation.temperature is 0"),
        (["rollout.top_k=1"], "rollout.top_k is 1 but rollout.group_size is 8"),
        (["algorithm.dual_clip=3", "algorithm.loss=cispo"], "algorithm.dual_clip is 3 but algorithm.loss is 'cispo'"),
        (["algorithm.preset=verl", "algorithm.loss=reinforce"], "dual_clip is 3 but algorithm.loss is 'reinforce'"),
        (["data.train.chat=false", "data.train.system_prompt=Hi"], "system_prompt is set but data.train.chat is false"),
        (
            ["evaluation.source={kind: reasoning_gym, task: chain_sum, size: 10, seed: 9}"],
            "data.train.seed is 0 (size 10) and evaluation.source.seed is 9 (size 10)",
        ),
    ],
)
def test_contradictions_between_sections(refusal: Refusal, overrides: list[str], part: str) -> None:
    message = refusal(overrides=overrides)
    assert part in message and "command line" in message


def test_dual_clip_goes_with_every_loss_that_has_it(minimal: str) -> None:
    for loss in ("clip", "gspo", "gspo_token"):
        load_config_text(minimal, [f"algorithm.loss={loss}", "algorithm.dual_clip=3"])
    load_config_text(minimal, ["algorithm.preset=verl", "algorithm.loss=cispo", "algorithm.dual_clip=null"])


def test_sources_that_do_not_meet(minimal: str) -> None:
    load_config_text(minimal, ["evaluation.source={kind: reasoning_gym, task: chain_sum, size: 10, seed: 10}"])
    load_config_text(
        minimal, ["evaluation.source={kind: reasoning_gym, task: chain_sum, seed: 0, options: {min_terms: 4}}"]
    )


def test_contradiction_points_at_both_lines(refusal: Refusal, minimal: str) -> None:
    message = refusal(minimal + "algorithm:\n  minibatches: 3\n", ["data.prompts_per_step=4"])
    assert message.endswith("(command line, data.prompts_per_step=4; a.yaml, line 11)")


def test_group_of_one_is_fine_for_sampling_only(minimal: str) -> None:
    load_config_text(minimal, ["rollout.group_size=1", "pipeline.mode=rollout_only"])


def test_training_needs_prompts_and_rewards(minimal: str) -> None:
    check_trainable(load_config_text(minimal))
    with pytest.raises(ConfigError) as caught:
        check_trainable(load_config_text(minimal, ["data.train=null", "rewards.functions=[]"]))
    assert "data.train is null but pipeline.mode is 'train'" in str(caught.value)
    assert "rewards.functions is empty but pipeline.mode is 'train'" in str(caught.value)
    check_trainable(
        load_config_text(minimal, ["data.train=null", "pipeline={mode: train_only, replay: r}", "rewards.functions=[]"])
    )


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["algorithm.kl_gradient=k2"], "algorithm.kl_gradient is 'k2' but algorithm.beta is 0"),
        (["algorithm.beta=0.1", "algorithm.kl=k1"], "as a loss its expected gradient is zero"),
        (["algorithm.beta=0.1", "algorithm.kl_placement=in_reward"], "algorithm.kl is 'k3'"),
        (
            ["algorithm.beta=0.1", "algorithm.kl=k1", "algorithm.kl_placement=in_reward", "algorithm.kl_gradient=k2"],
            "the KL is not differentiated there",
        ),
        (["algorithm.max_refills=2"], "algorithm.filter_zero_variance is false"),
        (["rollout.top_p=0.9"], "sampled from a cut distribution"),
        (["evaluation.every=2"], "evaluation.source is null"),
    ],
)
def test_settings_that_are_probably_not_meant(minimal: str, overrides: list[str], part: str) -> None:
    warnings = config_warnings(load_config_text(minimal, overrides))
    assert len(warnings) == 1 and part in warnings[0]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.preset=trl"],
        ["algorithm.preset=reinforce_plus_plus"],
        ["algorithm.beta=0.1", "algorithm.kl=k1", "algorithm.kl_gradient=k2"],
        ["algorithm.preset=grpo"],
    ],
)
def test_nothing_to_warn_of(minimal: str, overrides: list[str]) -> None:
    assert config_warnings(load_config_text(minimal, overrides)) == []


def test_batch_must_divide_over_data_parallel_ranks(minimal: str) -> None:
    config = load_config_text(minimal, ["data.prompts_per_step=6", "algorithm.minibatches=3"])
    with pytest.raises(ConfigError, match=r"data.prompts_per_step is 6 but parallel.dp is 4; .* 8 would do"):
        resolve(config, 4)
    with pytest.raises(ConfigError, match=r"6 / 3 = 2 but parallel.dp is 3"):
        resolve(config, 3)
    assert resolve(config, 2).parallel.dp == 2


@pytest.mark.parametrize(
    ("parallel", "world", "part"),
    [
        ({"tp": 2}, 3, "world size 3 is not a multiple of tp * pp * cp = 2 * 1 * 1 = 2; start 4 processes"),
        (
            {"tp": 2, "dp": 3},
            4,
            "parallel.dp is 3 but world size 4 / (tp 2 * pp 1 * cp 1) = 2; leave dp out or start 6",
        ),
        ({"tp": 2}, 2, "parallel.tp is 2 but the model's num_heads is 9, not a multiple; tp may be 1"),
        ({"tp": 9}, 9, "parallel.tp is 9 but the model's num_kv_heads is 3, not a multiple; tp may be 1, 3"),
        ({"pp": 4}, 4, "parallel.pp is 4 but the model's num_layers is 30, not a multiple; pp may be 1, 2, 3"),
        ({"ep": 2}, 2, "parallel.ep is 2 but the model has no experts (num_experts is 0); leave ep out"),
        ({"etp": 2}, 2, "parallel.etp is 2 but the model has no experts"),
        ({"moe_dispatcher": "megatron"}, 2, "parallel.moe_dispatcher is 'megatron' but the model has no experts"),
        ({"sequence_parallel": True}, 1, "parallel.sequence_parallel is true but parallel.tp is 1"),
    ],
)
def test_layout_that_a_dense_model_cannot_have(parallel: dict[str, int], world: int, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_parallel(ParallelConfig(**parallel), SMOLLM2, world)  # type: ignore[arg-type]
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "world", "part"),
    [
        ({"ep": 3}, 3, "parallel.ep is 3 but the model's num_experts is 4, not a multiple; ep may be 1, 2"),
        ({"ep": 4}, 2, "parallel.etp * parallel.ep is 1 * 4 = 4 but tp * cp * dp is 1 * 1 * 2 = 2"),
        ({"tp": 2, "ep": 2, "etp": 2}, 2, "parallel.etp * parallel.ep is 2 * 2 = 4 but tp * cp * dp is 2 * 1 * 1 = 2"),
        ({"tp": 2, "sequence_parallel": False}, 2, "parallel.sequence_parallel is false but parallel.tp is 2"),
        ({"etp": 3}, 3, "parallel.etp is 3 but the model's moe_ffn_hidden_size is 64"),
    ],
)
def test_layout_that_experts_cannot_have(parallel: dict[str, int], world: int, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_parallel(ParallelConfig(**parallel), TINY_MOE, world)  # type: ignore[arg-type]
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "shape", "world", "dp", "etp", "sequence_parallel"),
    [
        ({}, SMOLLM2, 1, 1, 1, False),
        ({}, SMOLLM2, 2, 2, 1, False),
        ({"tp": 3, "pp": 2}, SMOLLM2, 12, 2, 3, False),
        ({"tp": 3, "sequence_parallel": True}, SMOLLM2, 3, 1, 3, True),
        ({"tp": 2}, TINY_MOE, 4, 2, 2, True),
        ({"ep": 2}, TINY_MOE, 4, 4, 1, False),
        ({"tp": 2, "ep": 2}, TINY_MOE, 2, 1, 1, True),
        ({"tp": 2, "ep": 2, "etp": 2}, TINY_MOE, 4, 2, 2, True),
        ({"pp": 2, "ep": 2}, TINY_MOE, 4, 2, 1, False),
    ],
)
def test_layout_is_filled_in(
    parallel: dict[str, int], shape: ModelShape, world: int, dp: int, etp: int, sequence_parallel: bool
) -> None:
    got = check_parallel(ParallelConfig(**parallel), shape, world)  # type: ignore[arg-type]
    assert (got.dp, got.etp, got.sequence_parallel) == (dp, etp, sequence_parallel)
    assert check_parallel(got, shape, world) == got


def test_every_layout_problem_is_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        check_parallel(ParallelConfig(tp=2, pp=4), SMOLLM2, 8)
    assert str(caught.value).count("\n") == 3


def test_formula_of_the_defaults(minimal: str) -> None:
    formula = objective_formula(load_config_text(minimal))
    assert "A_i = (r_i - mean(r)) / (std(r, ddof 0) + 0.0001)" in formula
    assert "L_t = -min(rho A_i, clip(rho, 0.8, 1.2) A_i)" in formula
    assert "loss = (1 / N_sequences) sum_i (sum_t m_t L_t / sum_t m_t)" in formula
    assert "ref" not in formula and "entropy" not in formula


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["algorithm.preset=dapo"], "clip(rho, 0.8, 1.28)"),
        (["algorithm.preset=dapo"], "r_i - 1 * clip((length_i - 205) / 51, 0, 1)"),
        (["algorithm.preset=dr_grpo"], "A_i = r_i - mean(r);"),
        (["algorithm.preset=dr_grpo"], "(1 / (N_sequences * 256)) sum_i sum_t m_t L_t"),
        (["algorithm.preset=gspo"], "s_i = exp(mean_t(lp_t - old_t))"),
        (["algorithm.preset=cispo"], "L_t = -sg(clip(rho, 0, 5)) A_i lp_t"),
        (["algorithm.preset=rloo"], "A_i = r_i - mean(r without r_i);"),
        (["algorithm.preset=rloo"], "L_t = -A_i lp_t"),
        (["algorithm.preset=reinforce_plus_plus"], "r_i <- r_i + 0.01 * sum_t m_t d_t"),
        (["algorithm.preset=verl"], "L_t <- min(L_t, 3 |A_i|)  where A_i < 0"),
        (["algorithm.preset=nemo_rl"], "+ 0.01 * (exp(d) - d - 1),  d = ref_t - lp_t  (k3)"),
        (["algorithm.beta=0.1", "algorithm.kl_gradient=k2"], "(k3, with k2's gradient)"),
        (["algorithm.correction=tis"], "w_t = min(exp(old_t - roll_t), 2)"),
        (["algorithm.entropy_coef=0.01"], "L_t <- L_t - 0.01 * entropy_t"),
        (["algorithm.quantile=0.25"], "r_i <- (clip(r_i, Q(0.25), Q(0.75)) - Q(0.25)) / (Q(0.75) - Q(0.25))"),
        (["rewards.functions.0.weight=0.5"], "r_i = 0.5 * exact"),
        (["algorithm.mask_truncated=true"], "truncated responses are left out"),
    ],
)
def test_formula_shows_what_is_set(minimal: str, overrides: list[str], part: str) -> None:
    formula = objective_formula(load_config_text(minimal, overrides))
    assert part in formula and formula.isascii()
