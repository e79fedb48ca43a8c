// lockstep/optimizers.h: SGD, Adam, AdamW, LAMB and LARS.
#pragma once

#include "lockstep/optimizer.h"

// ---- stochastic gradient descent with momentum, Nesterov's momentum and weight decay, as
// torch::optim::SGD computes it (Sutskever et al., 2013). 16-bit parameters are updated through a float32 original.

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

// ---- Adam (Kingma and Ba, 2015) and AdamW, with decoupled weight decay (Loshchilov and Hutter, 2019), as
// torch::optim computes them. 16-bit parameters are updated through a float32 original. S3 uses Adam.

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

// ---- LAMB, layer-wise adaptive moments for large batches (You et al., "Large Batch Optimization for Deep
// Learning", ICLR 2020, algorithm 2, with phi the identity).

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

// ---- LARS, layer-wise adaptive rate scaling for large batches (You, Gitman and Ginsburg, "Large Batch
// Training of Convolutional Networks", 2017, algorithm 1).

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
