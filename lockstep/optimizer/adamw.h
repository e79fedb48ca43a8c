// optimizer/adamw.h: Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as torch::optim::AdamW computes it,
// in one pass per parameter (libtorch's fused kernel).
#pragma once

#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

class AdamW : public Optimizer {
 public:
  AdamW(std::vector<torch::Tensor> parameters, const AdamWOptions& options);  // throws UsageError

  StateTensors state_of(const torch::Tensor& parameter) const override;  // exp_avg, exp_avg_sq, step
  void set_state(const torch::Tensor& parameter, const StateTensors& state) override;

 protected:
  void update(torch::optim::OptimizerParamGroup& group, const std::vector<torch::Tensor>& parameters) override;
};

}  // namespace lockstep
