"""The rollout module: prompt draws in, groups of rollouts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from grpo_mc.data.records import FinishReason, Group, Rollout, Segment
from grpo_mc.data.tokenizer import Tokenizer
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.pipeline.messages import PromptDraw
from grpo_mc.rollout.native import NativeEngine, Request, Response
from grpo_mc.rollout.sampling import NonFiniteLogits, SamplingParams


class RolloutModule:
    """Samples groups with an engine; every data-parallel rank takes its share of the draws."""

    def __init__(self, engine: NativeEngine, mesh: Mesh, tokenizer: Tokenizer) -> None:
        self.engine, self.mesh, self.tokenizer = engine, mesh, tokenizer

    def run(
        self, draws: Sequence[PromptDraw], params: SamplingParams, *, num_samples: int, policy_version: int,
        on_ended: Callable[[int], None] | None = None,
    ) -> list[Group]:  # fmt: skip
        """Samples `num_samples` responses of each of this data-parallel rank's draws.

        Args:
            draws: All draws of the round, the same on every rank.
            policy_version: Version of the weights, recorded in every rollout.
            on_ended: Called with the number of this rank's responses that have ended, as it grows.

        Returns:
            This rank's groups, not scored.

        Raises:
            NonFiniteLogits: The weights cannot be sampled from.
        """
        own = list(draws)[self.mesh.dp_rank :: self.mesh.dp]
        requests = [Request(draw.group_id, draw.prompt.token_ids, tuple(range(num_samples))) for draw in own]
        try:
            responses = self.engine.generate(requests, params, on_ended)
        except NonFiniteLogits as error:
            raise NonFiniteLogits(f"{error} {_since_when(policy_version)}") from error
        groups = [Group(draw.group_id, draw.prompt, []) for draw in own]
        for at, response in enumerate(responses):
            group = groups[at // num_samples]
            group.rollouts.append(self._rollout(group, response, params, policy_version))
        return groups

    def _rollout(self, group: Group, response: Response, params: SamplingParams, policy_version: int) -> Rollout:
        segment = Segment("model", np.array(response.token_ids, np.int64), np.array(response.logprobs, np.float32))
        return Rollout(
            group_id=group.group_id,
            sample_index=response.sample_index,
            prompt=group.prompt,
            segments=[segment],
            text=response_text(response, self.tokenizer, params),
            finish_reason=response.finish_reason,
            policy_versions=(policy_version,),
        )


def _since_when(policy_version: int) -> str:
    """What weights that give no finite logits come from, and what to change."""
    if policy_version == 0:
        return (
            "before any training step, so the weights as they were loaded give them: their numbers are too large for"
            " model.dtype, or config.json is not theirs; try model.dtype fp32 and check model.path"
        )
    return (
        f"after {policy_version} training batches: the weights have diverged; lower optimizer.lr, and resume from an"
        " earlier checkpoint or start again"
    )


def response_text(response: Response, tokenizer: Tokenizer, params: SamplingParams) -> str:
    """The response decoded, without a last end-of-sequence token and cut before the first stop string."""
    ids = list(response.token_ids)
    if response.finish_reason is FinishReason.FINISHED and ids and ids[-1] in tokenizer.eos_ids:
        ids.pop()
    text = tokenizer.decode(ids)
    cuts = [at for at in (text.find(stop) for stop in params.stop) if at >= 0]
    return text[: min(cuts)] if cuts else text
