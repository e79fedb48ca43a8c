// optimizer/adam.h: Adam (Kingma and Ba, 2015) and AdamW, with decoupled weight decay (Loshchilov and Hutter, 2019), as
// torch::optim computes them. 16-bit parameters are updated through a float32 original. S3 uses Adam.
#pragma once

#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

// m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  p -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  // added to the gradient: g += weight_decay p
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  // applied to the parameter: p -= lr weight_decay p
};

class Adam : public Optimizer {  // state: exp_avg, exp_avg_sq
 public:
  Adam(std::vector<torch::Tensor> parameters, const AdamOptions& options);  // throws UsageError

 private:
  void update(const Group& group, const Run<float>& run) const override;
  void update(const Group& group, const Run<double>& run) const override;
  void update_on_device(const Group& group, const std::vector<torch::Tensor>& parameters,
                        const std::vector<torch::Tensor>& gradients,
                        const std::vector<std::vector<torch::Tensor>>& state,
                        const std::vector<std::int64_t>& steps) const override;
};

class AdamW : public Optimizer {  // state: exp_avg, exp_avg_sq
 public:
  AdamW(std::vector<torch::Tensor> parameters, const AdamWOptions& options);  // throws UsageError

 private:
  void update(const Group& group, const Run<float>& run) const override;
  void update(const Group& group, const Run<double>& run) const override;
  void update_on_device(const Group& group, const std::vector<torch::Tensor>& parameters,
                        const std::vector<torch::Tensor>& gradients,
                        const std::vector<std::vector<torch::Tensor>>& state,
                        const std::vector<std::int64_t>& steps) const override;
};

}  // namespace lockstep
