"""The resolved objective as a formula in plain text, printed at the start of a run and by --dry-run.

It is written from the resolved settings alone, so that two people whose runs differ can see in what.
"""

from __future__ import annotations

from grpo_mc.config.algorithm import AlgorithmConfig
from grpo_mc.config.schema import Config

_KL = {"k1": "-d", "k2": "d^2 / 2", "k3": "exp(d) - d - 1"}


def objective_formula(config: Config) -> str:
    """The objective of a resolved configuration, several lines of plain ASCII text."""
    algorithm = config.algorithm
    name = f"preset {algorithm.preset}" if algorithm.preset else "no preset"
    lines = [f"objective ({name}, group_size G = {config.rollout.group_size})", *_reward_lines(config)]
    lines += _advantage_lines(algorithm)
    lines += _loss_lines(algorithm)
    lines += _aggregation_lines(config)
    lines.append(
        f"  groups in a batch: {config.data.prompts_per_step}; passes over it: {algorithm.epochs}; "
        f"optimizer steps in a pass: {algorithm.minibatches}; temperature {config.rollout.temperature:g} on both sides"
    )
    return "\n".join(lines)


def _reward_lines(config: Config) -> list[str]:
    algorithm = config.algorithm
    functions = config.rewards.functions
    terms = " + ".join(f"{function.weight:g} * {function.name or function.type}" for function in functions)
    lines = [f"  r_i = {terms or '(no reward function)'}"]
    if algorithm.overlong_buffer is not None and algorithm.overlong_penalty > 0:
        start = config.rollout.max_new_tokens - algorithm.overlong_buffer
        lines.append(
            f"  r_i <- r_i - {algorithm.overlong_penalty:g} * "
            f"clip((length_i - {start}) / {algorithm.overlong_buffer}, 0, 1)"
        )
    if algorithm.beta > 0 and algorithm.kl_placement == "in_reward":
        lines.append(f"  r_i <- r_i + {algorithm.beta:g} * sum_t m_t d_t,  d = ref - lp when sampled  (KL k1)")
    if algorithm.quantile is not None:
        q = algorithm.quantile
        lines.append(
            f"  r_i <- (clip(r_i, Q({q:g}), Q({1 - q:g})) - Q({q:g})) / (Q({1 - q:g}) - Q({q:g}))  (Q: quantile)"
        )
    return lines


def _advantage_lines(algorithm: AlgorithmConfig) -> list[str]:
    baseline = {"mean": "mean(r)", "leave_one_out": "mean(r without r_i)"}[algorithm.baseline]
    # The std of the others always divides by their number minus one, so ddof does not show there.
    scale = {
        "std": f"std(r, ddof {algorithm.ddof})",
        "leave_one_out_std": "std(r without r_i, ddof 1)",
        "batch_std": f"std(r over the batch, ddof {algorithm.ddof})",
    }.get(algorithm.scale)
    difference = f"r_i - {baseline}"
    advantage = difference if scale is None else f"({difference}) / ({scale} + {algorithm.eps:g})"
    lines = [f"  A_i = {advantage};  0 where all rewards of the group are equal"]
    if algorithm.filter_zero_variance:
        refills = f", replaced in at most {algorithm.max_refills} more rounds" if algorithm.max_refills else ""
        lines.append(f"  groups with equal rewards are dropped{refills}")
    return lines


def _loss_lines(algorithm: AlgorithmConfig) -> list[str]:
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    ratio = {
        "clip": ("rho", "rho_t = exp(lp_t - old_t)"),
        "cispo": ("rho", "rho_t = exp(lp_t - old_t)"),
        "gspo": ("s", "s_i = exp(mean_t(lp_t - old_t))"),
        "gspo_token": ("s", "s_t = sg(exp(mean_t(lp_t - old_t))) exp(lp_t - sg(lp_t))"),
    }.get(algorithm.loss)
    lines = []
    if ratio is None:
        loss = "-A_i lp_t"
    else:
        symbol, definition = ratio
        lines.append(f"  {definition}")
        clipped = f"clip({symbol}, {low:g}, {high:g})"
        loss = f"-sg({clipped}) A_i lp_t" if algorithm.loss == "cispo" else f"-min({symbol} A_i, {clipped} A_i)"
    weight = _correction_weight(algorithm)
    lines.append(f"  L_t = {loss}")
    if algorithm.dual_clip is not None:
        lines.append(f"  L_t <- min(L_t, {algorithm.dual_clip:g} |A_i|)  where A_i < 0")
    if weight is not None:
        lines.append(f"  L_t <- w L_t,  {weight}")
    if algorithm.beta > 0 and algorithm.kl_placement == "in_loss":
        gradient = {"direct": "", "k2": ", with k2's gradient", "importance": ", times rho_t"}[algorithm.kl_gradient]
        estimator = _KL[algorithm.kl]
        lines.append(
            f"  L_t <- L_t + {algorithm.beta:g} * ({estimator}),  d = ref_t - lp_t  ({algorithm.kl}{gradient})"
        )
    if algorithm.entropy_coef > 0:
        lines.append(f"  L_t <- L_t - {algorithm.entropy_coef:g} * entropy_t")
    return lines


def _correction_weight(algorithm: AlgorithmConfig) -> str | None:
    low, high = algorithm.correction_low, algorithm.correction_high
    return {
        "tis": f"w_t = min(exp(old_t - roll_t), {high:g})",
        "tis_sequence": f"w_i = min(exp(sum_t(old_t - roll_t)), {high:g})",
        "mask_token": f"w_t = 1 where {low:g} <= exp(old_t - roll_t) <= {high:g}, else 0",
        "mask_sequence": f"w_i = 1 where {low:g} <= exp(sum_t(old_t - roll_t)) <= {high:g}, else 0",
    }.get(algorithm.correction)


def _aggregation_lines(config: Config) -> list[str]:
    length = config.algorithm.norm_length or config.rollout.max_new_tokens
    value = {
        "token_mean": "sum_i sum_t m_t L_t / N_tokens",
        "sequence_mean_token_mean": "(1 / N_sequences) sum_i (sum_t m_t L_t / sum_t m_t)",
        "sequence_mean_token_sum": "(1 / N_sequences) sum_i sum_t m_t L_t",
        "sequence_mean_token_sum_norm": f"(1 / (N_sequences * {length})) sum_i sum_t m_t L_t",
        "group_mean": "(1 / N_groups) sum over groups of (sum m_t L_t / sum m_t)",
    }[config.algorithm.aggregation]
    masked = "; truncated responses are left out" if config.algorithm.mask_truncated else ""
    return [f"  loss = {value}  over the global minibatch{masked}"]
