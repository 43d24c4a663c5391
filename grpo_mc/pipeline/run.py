"""The entry points: train, evaluate, generate. Each builds what it needs, runs, and takes everything down again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_mc.config import Config, ModelConfig, ParallelConfig, RolloutConfig, RunConfig, to_yaml
from grpo_mc.data.dataset import PromptDataset
from grpo_mc.data.records import Prompt, Rollout
from grpo_mc.data.sampler import PromptSampler
from grpo_mc.megatron.mesh import destroy_mesh
from grpo_mc.megatron.train_step import Policy
from grpo_mc.pipeline.evaluation import EvalResult, Evaluator
from grpo_mc.pipeline.inference_module import InferenceModule
from grpo_mc.pipeline.loop import Sink, TrainingRun, TrainResult
from grpo_mc.pipeline.messages import PromptDraw
from grpo_mc.pipeline.reward_module import RewardModule
from grpo_mc.pipeline.rollout_module import RolloutModule
from grpo_mc.pipeline.scheduler import Scheduler
from grpo_mc.pipeline.setup import Runtime, build_reference, build_runtime
from grpo_mc.pipeline.training_module import TrainingModule
from grpo_mc.rollout.sampling import SamplingParams


def train(config: Config, *, resume_dir: Path | None, sink: Sink) -> TrainResult:
    """Runs GRPO as the configuration says.

    Args:
        config: Resolved.
        resume_dir: Go on with this run; None = a new one.
        sink: Where metrics, samples, evaluations and messages go.

    Raises:
        ValueError: Something in the configuration, the data or the weights does not fit.
        Interrupted: The run was asked to stop and is saved.
    """
    runtime = build_runtime(config)
    rewards: RewardModule | None = None
    try:
        rewards = RewardModule(config.rewards, runtime.mesh)
        run = _build_run(runtime, rewards, sink)
        sink.message(runtime.mesh.describe())
        if resume_dir is not None:
            run.resume()
        elif runtime.mesh.rank == 0:
            write_config(config)
        return run.run()
    finally:
        if rewards is not None:
            rewards.close()
        destroy_mesh()


def write_config(config: Config) -> None:
    """The resolved configuration into the run directory."""
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")


def _build_run(runtime: Runtime, rewards: RewardModule, sink: Sink) -> TrainingRun:
    config = runtime.config
    assert config.data.train is not None, "check_trainable has seen to it"
    dataset = PromptDataset(
        config.data.train, runtime.tokenizer, exclude=config.data.exclude,
        max_prompt_tokens=config.data.max_prompt_tokens,
    )  # fmt: skip
    sampler = PromptSampler(len(dataset), seed=config.run.seed, shuffle=config.data.shuffle)
    inference = None
    if config.algorithm.beta > 0:
        inference = InferenceModule(
            build_reference(config, runtime), runtime.mesh, temperature=config.rollout.temperature,
            max_tokens=config.inference.max_tokens_per_batch,
        )  # fmt: skip
    policy = Policy(
        runtime.model, runtime.mesh, algorithm=config.algorithm, optimizer=config.optimizer,
        temperature=config.rollout.temperature,
    )  # fmt: skip
    training = TrainingModule(policy, runtime.mesh, config)
    rollout = RolloutModule(runtime.engine, runtime.mesh, runtime.tokenizer)
    scheduler = Scheduler(
        config, dataset, sampler, rollout=rollout, rewards=rewards, training=training, inference=inference
    )
    return TrainingRun(runtime, scheduler, sampler, _build_evaluator(runtime), sink)


def _build_evaluator(runtime: Runtime) -> Evaluator | None:
    config = runtime.config
    if config.evaluation.source is None:
        return None
    dataset = PromptDataset(config.evaluation.source, runtime.tokenizer)
    return Evaluator(dataset, config.evaluation, config.rollout)


def evaluate(config: Config) -> EvalResult:
    """Measures model.path on evaluation.source.

    Raises:
        ValueError: evaluation.source is not set.
    """
    if config.evaluation.source is None:
        raise ValueError("eval: evaluation.source is not set; name held-out prompts there")
    runtime = build_runtime(config)
    rewards: RewardModule | None = None
    try:
        rewards = RewardModule(config.rewards, runtime.mesh)
        evaluator = _build_evaluator(runtime)
        assert evaluator is not None
        return evaluator.run(RolloutModule(runtime.engine, runtime.mesh, runtime.tokenizer), rewards, 0)
    finally:
        if rewards is not None:
            rewards.close()
        destroy_mesh()


def generate(
    model: str, prompts: Sequence[str], *, chat: bool = False, system_prompt: str | None = None, num_samples: int = 1,
    max_new_tokens: int = 128, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    stop: Sequence[str] = (), seed: int = 0, dtype: str = "fp32",
) -> list[Rollout]:  # fmt: skip
    """Samples text from a model.

    Args:
        model: As model.path.
        prompts: Raw texts, or user messages with `chat`.

    Returns:
        `num_samples` rollouts per prompt, in prompt order.
    """
    config = Config(
        model=ModelConfig(path=model, dtype=dtype),  # type: ignore[arg-type]
        parallel=ParallelConfig(),
        rollout=RolloutConfig(group_size=num_samples, max_new_tokens=max_new_tokens),
        run=RunConfig(dir=".", seed=seed, steps=0),
    )
    runtime = build_runtime(config)
    try:
        draws = []
        for at, text in enumerate(prompts):
            if chat:
                system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
                text = runtime.tokenizer.render_chat([*system, {"role": "user", "content": text}])
            draws.append(PromptDraw(at, Prompt(f"prompt:{at}", runtime.tokenizer.encode(text), text)))
        params = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=max_new_tokens, stop=tuple(stop)
        )
        module = RolloutModule(runtime.engine, runtime.mesh, runtime.tokenizer)
        groups = module.run(draws, params, num_samples=num_samples, policy_version=0)
        return [rollout for group in groups for rollout in group.rollouts]
    finally:
        destroy_mesh()
