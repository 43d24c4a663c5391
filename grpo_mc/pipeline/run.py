"""The entry points: train, evaluate, generate. Each builds what it needs, runs, and takes everything down again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from grpo_mc.config import Config, ModelConfig, ParallelConfig, RolloutConfig, RunConfig, to_yaml
from grpo_mc.data.dataset import held_out_prompts, training_prompts
from grpo_mc.data.records import Prompt, Rollout
from grpo_mc.megatron.mesh import destroy_mesh
from grpo_mc.megatron.train_step import Policy
from grpo_mc.pipeline.collectors import Collector, ReplayCollector, SamplingCollector, select_all, select_trainable
from grpo_mc.pipeline.evaluation import EvalResult, HeldOut
from grpo_mc.pipeline.inference_module import InferenceModule
from grpo_mc.pipeline.keeper import Keeper
from grpo_mc.pipeline.loop import Sink, TrainingRun, TrainResult
from grpo_mc.pipeline.messages import PromptDraw
from grpo_mc.pipeline.reward_module import RewardModule
from grpo_mc.pipeline.rollout_module import RolloutModule
from grpo_mc.pipeline.scheduler import NoTraining, Scheduler
from grpo_mc.pipeline.setup import Runtime, build_reference, build_runtime
from grpo_mc.pipeline.training_module import TrainingModule
from grpo_mc.rollout.sampling import SamplingParams


def train(config: Config, *, resume_dir: Path | None, sink: Sink) -> TrainResult:
    """Runs GRPO as the configuration says; see pipeline.mode for runs that only sample or only train.

    Args:
        config: Resolved.
        resume_dir: Go on with this run; None = a new one.
        sink: Where metrics, samples, evaluations and messages go. grpo_mc.monitor.RunMonitor also keeps a second run
            out of run.dir; another sink has to see to that itself.

    Raises:
        ValueError: Something in the configuration, the data or the weights does not fit, or nothing can be learnt.
        Interrupted: The run was asked to stop and is saved.
    """
    runtime = build_runtime(config, trains=config.pipeline.mode != "rollout_only")
    with ExitStack() as stack:
        stack.callback(destroy_mesh)
        run = _build_run(runtime, sink, stack)
        sink.message(runtime.mesh.describe())
        if resume_dir is not None:
            run.resume()
        if runtime.mesh.rank == 0:
            write_config(config)
        return run.run()


def write_config(config: Config) -> None:
    """The resolved configuration into the run directory. A resume starts from it, so it holds a resume's overrides."""
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    config = config.model_copy(update={"run": config.run.model_copy(update={"resume": False})})
    partial = run_dir / ".config.yaml.partial"
    partial.write_text(to_yaml(config), encoding="utf-8")
    partial.replace(run_dir / "config.yaml")


def _build_run(runtime: Runtime, sink: Sink, stack: ExitStack) -> TrainingRun:
    """Puts the modules together as pipeline.mode says.

    mode           collector   training         held-out prompts   checkpoints, export
    train          sampling    TrainingModule   yes                yes
    rollout_only   sampling    NoTraining       no                 no
    train_only     replay      TrainingModule   no (no engine)     yes
    """
    config, mode = runtime.config, runtime.config.pipeline.mode
    collector: Collector
    held_out, keeper = None, None
    if mode == "train_only":
        assert config.pipeline.replay is not None
        collector = ReplayCollector(config, config.pipeline.replay, vocab_size=runtime.architecture.vocab_size)
    else:
        rewards = stack.enter_context(closing(RewardModule(config.rewards, runtime.mesh)))
        rollout = RolloutModule(runtime.build_engine(), runtime.mesh, runtime.tokenizer)
        select = select_all if mode == "rollout_only" else select_trainable(config)
        dataset = training_prompts(config, runtime.tokenizer, runtime.architecture.max_positions)
        collector = SamplingCollector(config, dataset, rollout=rollout, rewards=rewards, select=select)
        if mode == "train" and config.evaluation.source is not None:
            held_out = _held_out(runtime, rollout, rewards, sink.progress)
    if mode == "rollout_only":
        scheduler = Scheduler(collector=collector, training=NoTraining(), inference=None)
    else:
        inference = _build_inference(runtime) if config.algorithm.beta > 0 else None
        training = _build_training(runtime)
        stack.callback(training.policy.close)
        scheduler = Scheduler(collector=collector, training=training, inference=inference)
        keeper = Keeper(runtime, training)
    return TrainingRun(runtime, scheduler, sink, held_out=held_out, keeper=keeper)


def _build_inference(runtime: Runtime) -> InferenceModule:
    config = runtime.config
    return InferenceModule(
        build_reference(config, runtime), runtime.mesh, temperature=config.rollout.temperature,
        max_tokens=config.inference.max_tokens_per_batch,
    )  # fmt: skip


def _build_training(runtime: Runtime) -> TrainingModule:
    config = runtime.config
    policy = Policy(
        runtime.model, runtime.mesh, algorithm=config.algorithm, optimizer=config.optimizer,
        temperature=config.rollout.temperature, compression=config.parallel.grad_compression,
    )  # fmt: skip
    return TrainingModule(policy, runtime.mesh, config)


def _held_out(
    runtime: Runtime, rollout: RolloutModule, rewards: RewardModule, on_progress: Callable[[int, int], None] | None
) -> HeldOut:
    config = runtime.config
    dataset = held_out_prompts(config, runtime.tokenizer, runtime.architecture.max_positions)
    return HeldOut(
        dataset, config.evaluation, config.rollout, rollout=rollout, rewards=rewards, on_progress=on_progress
    )


def evaluate(config: Config, *, on_progress: Callable[[int, int], None] | None = None) -> EvalResult:
    """Measures model.path on evaluation.source.

    Args:
        config: Resolved.
        on_progress: See HeldOut.

    Raises:
        ValueError: evaluation.source is not set.
    """
    if config.evaluation.source is None:
        raise ValueError("eval: evaluation.source is not set; name held-out prompts there")
    runtime = build_runtime(config)
    with ExitStack() as stack:
        stack.callback(destroy_mesh)
        rewards = stack.enter_context(closing(RewardModule(config.rewards, runtime.mesh)))
        rollout = RolloutModule(runtime.build_engine(), runtime.mesh, runtime.tokenizer)
        return _held_out(runtime, rollout, rewards, on_progress).measure(policy_version=0)


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
    if not model:
        raise ValueError("generate: the model is an empty text; give a folder of weights, a .gguf file or package:NAME")
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
        module = RolloutModule(runtime.build_engine(), runtime.mesh, runtime.tokenizer)
        groups = module.run(draws, params, num_samples=num_samples, policy_version=0)
        return [rollout for group in groups for rollout in group.rollouts]
    finally:
        destroy_mesh()
