// The schema of every operator, and nothing else. Implementations register themselves per device: csrc/cpu/, csrc/cuda/.
#include <torch/library.h>

TORCH_LIBRARY(grpo_mc, m) {
  // What this library was built against and which CPU code it runs, as JSON text.
  m.def("build_info() -> str");

  // logprobs [T], entropy [T] ([0] without with_entropy), lse [T] float64: log-sum-exp of logits / temperature.
  m.def(
      "token_logprobs(Tensor logits, Tensor targets, float temperature, int vocab_size, bool with_entropy, "
      "bool inplace_backward) -> (Tensor logprobs, Tensor entropy, Tensor lse)");
  m.def(
      "token_logprob_stats(Tensor logits, Tensor targets, int vocab_start, int vocab_size, float temperature) "
      "-> (Tensor max, Tensor sumexp, Tensor sum_p_logit, Tensor target_logit)");
  m.def(
      "token_logprobs_backward(Tensor logits, Tensor targets, Tensor lse, Tensor? entropy, Tensor grad_logprobs, "
      "Tensor? grad_entropy, float temperature, int vocab_start, int vocab_size) -> Tensor");
  // The same, written over the logits.
  m.def(
      "token_logprobs_backward_(Tensor(a!) logits, Tensor targets, Tensor lse, Tensor? entropy, Tensor grad_logprobs, "
      "Tensor? grad_entropy, float temperature, int vocab_start, int vocab_size) -> ()");

  m.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor lengths, "
      "float scale) -> Tensor");

  m.def("row_linear(Tensor x, Tensor weight) -> Tensor");

  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");

  m.def(
      "group_advantages(Tensor rewards, Tensor group_ids, Tensor? valid, str baseline, str scale, int ddof, float eps) "
      "-> Tensor");

  // loss [], metrics [8] float64 in the order of grpo_mc.ops.policy_loss.METRICS, and the gradients of the loss with
  // respect to logprobs [T] and entropy ([T], or [0] when no gradient reaches it).
  m.def(
      "policy_loss(Tensor logprobs, Tensor old_logprobs, Tensor advantages, Tensor loss_mask, Tensor? ref_logprobs, "
      "Tensor? entropy, Tensor? weights, Tensor? cu_seqlens, Tensor? sequence_groups, Tensor denominator, *, str kind, "
      "float clip_low, float clip_high, float? dual_clip, str? kl, str kl_gradient, float beta, float entropy_coef, "
      "str aggregation, int? norm_length) -> (Tensor loss, Tensor metrics, Tensor grad_logprobs, Tensor grad_entropy)");
}
