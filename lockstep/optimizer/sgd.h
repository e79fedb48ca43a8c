// optimizer/sgd.h: stochastic gradient descent with momentum, Nesterov's momentum and weight decay, as
// torch::optim::SGD computes it (Sutskever et al., 2013). 16-bit parameters are updated through a float32 original.
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

class SGD : public Optimizer {  // state: momentum_buffer, if there is momentum
 public:
  // Throws UsageError: negative values, Nesterov without momentum.
  SGD(std::vector<torch::Tensor> parameters, const SGDOptions& options);

 private:
  void update(const Group& group, const Run<float>& run) const override;
  void update(const Group& group, const Run<double>& run) const override;
  void update_on_device(const Group& group, const std::vector<torch::Tensor>& parameters,
                        const std::vector<torch::Tensor>& gradients,
                        const std::vector<std::vector<torch::Tensor>>& state,
                        const std::vector<std::int64_t>& steps) const override;
};

}  // namespace lockstep
