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
}
