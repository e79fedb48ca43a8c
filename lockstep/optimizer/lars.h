// optimizer/lars.h: LARS, layer-wise adaptive rate scaling for large batches (You, Gitman and Ginsburg, "Large Batch
// Training of Convolutional Networks", 2017, algorithm 1).
#pragma once

#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

// ratio = trust |p| / (|g| + weight_decay |p|), norms over each parameter; 1 where |p| or |g| is 0
// v = momentum v + lr ratio (g + weight_decay p);  p -= v
struct LARSOptions {
  double lr = 0.1;
  double momentum = 0.9;
  double weight_decay = 1e-4;
  double trust = 1e-3;
};

class LARS : public Optimizer {  // state: momentum_buffer
 public:
  LARS(std::vector<torch::Tensor> parameters, const LARSOptions& options);  // throws UsageError

 private:
  bool layerwise() const override { return true; }
  double trust_ratio(const Group& group, double parameter_norm, double gradient_norm) const override;
  void update(const Group& group, const Run<float>& run) const override;
  void update(const Group& group, const Run<double>& run) const override;
  void update_on_device(const Group& group, const std::vector<torch::Tensor>& parameters,
                        const std::vector<torch::Tensor>& gradients,
                        const std::vector<std::vector<torch::Tensor>>& state,
                        const std::vector<std::int64_t>& steps) const override;
};

}  // namespace lockstep
