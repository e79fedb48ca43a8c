// optimizer/sgd.h: stochastic gradient descent with momentum, Nesterov's momentum and weight decay, as torch::optim::SGD
// computes it (Sutskever et al., 2013), in one pass per parameter (libtorch's fused kernel).
#pragma once

#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

// g += weight_decay p;  v = momentum v + g;  p -= lr (nesterov ? g + momentum v : v)
struct SGDOptions {
  double lr = 0.01;
  double momentum = 0;
  bool nesterov = false;
  double weight_decay = 0;
};

class SGD : public Optimizer {
 public:
  // Throws UsageError: negative values, Nesterov without momentum.
  SGD(std::vector<torch::Tensor> parameters, const SGDOptions& options);

  StateTensors state_of(const torch::Tensor& parameter) const override;  // momentum_buffer
  void set_state(const torch::Tensor& parameter, const StateTensors& state) override;

 protected:
  void update(torch::optim::OptimizerParamGroup& group, const std::vector<torch::Tensor>& parameters) override;

 private:
  torch::Tensor momentum_buffer(const torch::Tensor& parameter);
};

}  // namespace lockstep
