// The schema of every operator, and nothing else. Drivers (csrc/drivers/) check the
// arguments and run the kernels of the tensors' device: csrc/cpu/ or csrc/cuda/.
#include <torch/library.h>

TORCH_LIBRARY(grpo_mc, m) {
  // What this library was built against and which CPU code it runs, as JSON text.
  m.def("build_info() -> str");
  // Opens the CUDA library: its launchers serve CUDA tensors, or with `emulated` (tests) all tensors. "" forgets it.
  m.def("load_cuda(str path, bool emulated) -> ()");

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

  // Codes [M, K] e4m3 and one float32 scale for each tile; the rules are in common/fp8.h. With offsets [E + 1] tiles of
  // 128 x 1 start again at each expert's first row.
  m.def(
      "quantize_fp8(Tensor x, int tile_rows, int tile_columns, bool power_of_two, Tensor? offsets=None) "
      "-> (Tensor codes, Tensor scale)");
  m.def(
      "dequantize_fp8(Tensor codes, Tensor scale, int tile_rows, int tile_columns, ScalarType dtype, "
      "Tensor? offsets=None) -> Tensor");
  // out [M, N] (+)= a [M, K] times b [N, K] transposed, both dequantised.
  m.def("fp8_gemm_(Tensor(a!) out, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, bool accumulate) -> ()");
  // The same for experts: rows offsets[e] to offsets[e + 1] of a meet b [E, N, K] at e.
  m.def(
      "fp8_grouped_gemm_(Tensor(a!) out, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offsets, "
      "bool accumulate) -> ()");

  // out[e] [N, K] (+)= rows offsets[e] to offsets[e + 1] of grad [M, N] transposed times those of x [M, K].
  m.def(
      "fp8_grouped_wgrad_(Tensor(a!)[] out, Tensor grad, Tensor grad_scale, Tensor x, Tensor x_scale, Tensor offsets, "
      "bool accumulate) -> ()");

  // row_map [T, K]: the row of each token's choice, -1 without one; offsets [E + 1]: the rows of each expert.
  m.def("moe_plan(Tensor expert_ids, int num_experts, int? capacity, int align) -> (Tensor row_map, Tensor offsets)");
  m.def("moe_permute(Tensor x, Tensor probs, Tensor row_map, int num_rows) -> (Tensor rows, Tensor row_probs)");
  m.def("moe_permute_(Tensor(a!) rows, Tensor(b!) row_probs, Tensor x, Tensor probs, Tensor row_map) -> ()");
  m.def("moe_unpermute(Tensor rows, Tensor row_map, Tensor? probs) -> Tensor");
  m.def("moe_unpermute_(Tensor(a!) out, Tensor rows, Tensor row_map, Tensor? probs) -> ()");
  m.def(
      "moe_unpermute_backward(Tensor grad_out, Tensor rows, Tensor row_map, Tensor probs) "
      "-> (Tensor grad_rows, Tensor grad_probs)");

  // Codes [blocks, block / 2], two a byte, and scales [blocks]; the error state is read and replaced.
  m.def(
      "quantize_int4(Tensor x, Tensor(a!)? error_codes, Tensor(b!)? error_scale, int block, bool stochastic, "
      "bool hadamard, int seed, int offset) -> (Tensor codes, Tensor scale)");
  m.def("dequantize_int4_(Tensor(a!) out, Tensor codes, Tensor scale, int block, bool hadamard, bool add) -> ()");
  // The same with codes [blocks, block] int8.
  m.def(
      "quantize_int8(Tensor x, Tensor(a!)? error_codes, Tensor(b!)? error_scale, int block, bool stochastic, "
      "bool hadamard, int seed, int offset) -> (Tensor codes, Tensor scale)");
  m.def("dequantize_int8_(Tensor(a!) out, Tensor codes, Tensor scale, int block, bool hadamard, bool add) -> ()");

  // One Adam step, in place. The moments are float32, or codes of 8 or 4 bits with scales; see common/adam.h.
  m.def(
      "adam_step_(Tensor(a!) params, Tensor grads, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? exp_avg_scale, "
      "Tensor(e!)? exp_avg_sq_scale, Tensor(f!)? out_bf16, float lr, float beta1, float beta2, float eps, "
      "float weight_decay, int step, float grad_scale, float clip_coef, int seed, int offset) -> ()");

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
