// The gradient formula of policy_loss, for every device: forward computes it, backward scales it.
//
// Registered here and not from Python because the operator takes a few tenths of a millisecond, and a formula
// registered through torch.library costs as much again on each call.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace grpo_mc {
namespace {

using at::Tensor;
using std::string_view;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using OptionalTensor = std::optional<Tensor>;
using Signature = Result(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                         const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&, string_view, double,
                         double, std::optional<double>, std::optional<string_view>, string_view, double, double, string_view,
                         std::optional<int64_t>);

class PolicyLoss : public torch::autograd::Function<PolicyLoss> {
 public:
  // `call` runs the operator below autograd; logprobs and entropy are what a gradient may flow to. An absent entropy
  // is no input to autograd at all, so needs_input_grad(1) may be asked only where trains_entropy.
  template <typename Call>
  static variable_list forward(AutogradContext* context, const Tensor&, const OptionalTensor&, bool trains_entropy,
                               const Call& call) {
    context->saved_data["trains_entropy"] = trains_entropy;
    const auto [loss, metrics, grad_logprobs, grad_entropy] = call();
    context->mark_non_differentiable({metrics, grad_logprobs, grad_entropy});
    context->set_materialize_grads(false);
    context->save_for_backward({grad_logprobs, grad_entropy});
    return {loss, metrics, grad_logprobs, grad_entropy};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(4);
    const variable_list saved = context->get_saved_variables();
    const bool for_entropy = context->saved_data["trains_entropy"].toBool() && context->needs_input_grad(1);
    return {context->needs_input_grad(0) ? saved[0].mul(grads[0]) : Tensor(), for_entropy ? saved[1].mul(grads[0]) : Tensor(),
            Tensor(), Tensor()};
  }
};

Result policy_loss(const Tensor& logprobs, const Tensor& old_logprobs, const Tensor& advantages, const Tensor& loss_mask,
                   const OptionalTensor& ref_logprobs, const OptionalTensor& entropy, const OptionalTensor& weights,
                   const OptionalTensor& cu_seqlens, const OptionalTensor& sequence_groups, const Tensor& denominator,
                   string_view kind, double clip_low, double clip_high, std::optional<double> dual_clip,
                   std::optional<string_view> kl, string_view kl_gradient, double beta, double entropy_coef,
                   string_view aggregation, std::optional<int64_t> norm_length) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("grpo_mc::policy_loss", "").typed<Signature>();
  const auto call = [&]() {
    const at::AutoDispatchBelowADInplaceOrView below;
    return op.call(logprobs, old_logprobs, advantages, loss_mask, ref_logprobs, entropy, weights, cu_seqlens, sequence_groups,
                   denominator, kind, clip_low, clip_high, dual_clip, kl, kl_gradient, beta, entropy_coef, aggregation,
                   norm_length);
  };
  const variable_list out = PolicyLoss::apply(logprobs, entropy, entropy.has_value() && entropy_coef != 0, call);
  return {out[0], out[1], out[2], out[3]};
}

}  // namespace

TORCH_LIBRARY_IMPL(grpo_mc, Autograd, m) { m.impl("policy_loss", policy_loss); }

}  // namespace grpo_mc
