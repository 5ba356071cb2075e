#include "../../csrc/cuda/batch_norm_backward_kernels.cuh"

#include <vector>

#include "batch_norm_source.h"

namespace {

// Fitted statistics are written into a bank of T snapshots first, as the launcher does.
template <typename acc_t>
struct FittedBank {
  std::vector<acc_t> mean, var;
  std::vector<int64_t> snapshot;

  explicit FittedBank(const BatchNorm& call)
      : mean(call.T * call.C), var(call.T * call.C), snapshot(call.T) {
    bnuq::run_fitted_moments(
        fitted_source<acc_t>(call), mean.data(), var.data(), snapshot.data(), call.T, nullptr);
  }
  bnuq::BankSource<acc_t> source(const BatchNorm& call) const {
    return {mean.data(), var.data(), snapshot.data(), nullptr, call.T, call.C};
  }
};

template <typename scalar_t, typename acc_t>
void backward(const BatchNorm& call, const bnuq::BankSource<acc_t>& source) {
  const bnuq::BackwardArgs<scalar_t> args = {
      static_cast<const scalar_t*>(call.grad_y),
      static_cast<const scalar_t*>(call.y),
      static_cast<const scalar_t*>(call.x),
      static_cast<scalar_t*>(call.grad_x),
      static_cast<scalar_t*>(call.grad_residual),
      parameters<acc_t>(call),
      {call.T, call.N, call.C, call.S}};
  if (call.grad_x || call.grad_residual) bnuq::run_gradients(args, source, call.shared, nullptr);
  if (!call.sums) return;
  const bnuq::SumsPlan plan = bnuq::plan_sums(args);
  std::vector<acc_t> partial(plan.partials, acc_t(NAN));
  bnuq::run_sums(
      args, source, call.shared, partial.data(), static_cast<acc_t*>(call.sums), plan, nullptr);
}

}  // namespace

void batch_norm_backward(const BatchNorm& call) {
  by_dtype(call.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = bnuq::acc_type<scalar_t>;
    if (call.params)
      backward<scalar_t>(call, FittedBank<acc_t>(call).source(call));
    else
      backward<scalar_t>(call, bank_source<acc_t>(call));
  });
}
