// optimizer/lamb.h: LAMB, layer-wise adaptive moments for large batches (You et al., "Large Batch Optimization for Deep
// Learning", ICLR 2020, algorithm 2, with phi the identity).
#pragma once

#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

// m and v as in Adam, corrected for bias; u = m / (sqrt(v) + eps) + weight_decay p;  p -= lr (|p| / |u|) u, norms over
// each parameter; a ratio with a norm of 0 is 1.
struct LAMBOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-6;
  double weight_decay = 1e-2;
};

class LAMB : public Optimizer {  // state: exp_avg, exp_avg_sq
 public:
  LAMB(std::vector<torch::Tensor> parameters, const LAMBOptions& options);  // throws UsageError

 private:
  bool layerwise() const override { return true; }
  void direct(const Group& group, const Run<float>& run) const override;
  void direct(const Group& group, const Run<double>& run) const override;
  double trust_ratio(const Group& group, double parameter_norm, double direction_norm) const override;
  void update(const Group& group, const Run<float>& run) const override;
  void update(const Group& group, const Run<double>& run) const override;
  void update_on_device(const Group& group, const std::vector<torch::Tensor>& parameters,
                        const std::vector<torch::Tensor>& gradients,
                        const std::vector<std::vector<torch::Tensor>>& state,
                        const std::vector<std::int64_t>& steps) const override;
};

}  // namespace lockstep
