// SPDX-License-Identifier: Apache-2.0
// lockstep/optimizers.h: SGD, Adam, AdamW, LAMB, LARS, RMSprop and Adagrad, and how to choose one of them at run time.
//
// Flow:    options -> an Optimizer -> step()
// Owns:    as lockstep/optimizer.h
// Threads: one thread
// Ranks:   every rank makes the same optimizer with the same options
//
// All update 16-bit parameters through a float32 original. Notation: parameter p, gradient g, step t from 1; norms |.|
// are 2-norms over one parameter. Constructors throw UsageError: negative values, a beta outside [0, 1), SGD with
// nesterov but without momentum.
//
// HACKING.md says how to add an optimizer.
#pragma once

#include <type_traits>
#include <variant>

#include "lockstep/optimizer.h"

namespace lockstep {

// Stochastic gradient descent with momentum (Sutskever et al., 2013), as torch::optim::SGD computes it.
//   g += weight_decay p;  v = momentum v + g;  p -= lr (nesterov ? g + momentum v : v)
struct SGDOptions {
  double lr = 0.01;
  double momentum = 0;
  bool nesterov = false;
  double weight_decay = 0;
};

// Adam (Kingma and Ba, 2015), as torch::optim::Adam computes it.
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   p -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  // added to the gradient: g += weight_decay p
};

// Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as torch::optim::AdamW computes it.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  // applied to the parameter: p -= lr weight_decay p
};

// LAMB, layerwise adaptive moments for large batches (You et al., "Large Batch Optimization for Deep Learning",
// ICLR 2020, algorithm 2 with phi the identity).
//   m and v as in Adam, corrected for bias;  u = m / (sqrt(v) + eps) + weight_decay p
//   p -= lr (|p| / |u|) u; the ratio is 1 where a norm is 0
struct LAMBOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-6;
  double weight_decay = 1e-2;
};

// LARS, layerwise adaptive rate scaling for large batches (You, Gitman and Ginsburg, "Large Batch Training of
// Convolutional Networks", 2017, algorithm 1).
//   ratio = trust |p| / (|g| + weight_decay |p|); 1 where |p| or |g| is 0
//   v = momentum v + lr ratio (g + weight_decay p);  p -= v
struct LARSOptions {
  double lr = 0.1;
  double momentum = 0.9;
  double weight_decay = 1e-4;
  double trust = 1e-3;
};

// RMSprop (Tieleman and Hinton, 2012), as torch::optim::RMSprop computes it.
//   g += weight_decay p;  s = alpha s + (1 - alpha) g^2;  v = momentum v + g / (sqrt(s) + eps);  p -= lr v
struct RMSpropOptions {
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
};

// Adagrad (Duchi, Hazan and Singer, 2011), as torch::optim::Adagrad computes it.
//   g += weight_decay p;  s += g^2;  p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)
struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double eps = 1e-10;
};

// The rule that these options choose. Throws UsageError.
std::unique_ptr<UpdateRule> rule_of(const SGDOptions& options);
std::unique_ptr<UpdateRule> rule_of(const AdamOptions& options);
std::unique_ptr<UpdateRule> rule_of(const AdamWOptions& options);
std::unique_ptr<UpdateRule> rule_of(const LAMBOptions& options);
std::unique_ptr<UpdateRule> rule_of(const LARSOptions& options);
std::unique_ptr<UpdateRule> rule_of(const RMSpropOptions& options);
std::unique_ptr<UpdateRule> rule_of(const AdagradOptions& options);

template <class Options>
class OptimizerWith : public Optimizer {
 public:
  OptimizerWith(Tensors parameters, const Options& options)
      : Optimizer(std::move(parameters), std::make_unique<GroupOptions<Options>>(options), rule_of(options)) {}
};

using SGD = OptimizerWith<SGDOptions>;          // state: momentum_buffer, if there is momentum
using Adam = OptimizerWith<AdamOptions>;        // state: exp_avg, exp_avg_sq
using AdamW = OptimizerWith<AdamWOptions>;      // state: exp_avg, exp_avg_sq
using LAMB = OptimizerWith<LAMBOptions>;        // state: exp_avg, exp_avg_sq
using LARS = OptimizerWith<LARSOptions>;        // state: momentum_buffer
using RMSprop = OptimizerWith<RMSpropOptions>;  // state: square_avg; momentum_buffer, if there is momentum
using Adagrad = OptimizerWith<AdagradOptions>;  // state: sum

// ---- Choosing one at run time

// Says which optimizer, and with which options. Plain bytes: may be copied with memcpy between processes of one
// program.
using OptimizerOptions =
    std::variant<SGDOptions, AdamOptions, AdamWOptions, LAMBOptions, LARSOptions, RMSpropOptions, AdagradOptions>;
static_assert(std::is_trivially_copyable_v<OptimizerOptions>);

std::shared_ptr<Optimizer> make_optimizer(Tensors parameters, const OptimizerOptions& options);

std::string name_of(const OptimizerOptions& options);  // "sgd"
bool layerwise(const OptimizerOptions& options);       // its steps depend on norms over whole parameters
std::vector<std::string> optimizer_names();            // in the order of OptimizerOptions

// Every option by the name of its field, such as {"lr", 0.1}; false is 0.
using OptionValues = std::map<std::string, double>;
OptionValues values_of(const OptimizerOptions& options);
OptionValues values_of(const torch::optim::OptimizerOptions& options);  // of a parameter group; of others only "lr"

// The options of the optimizer called `name`: its defaults, but for those of `values` that it has. Throws UsageError
// naming those there are.
OptimizerOptions optimizer_options(const std::string& name, const OptionValues& values = {});

}  // namespace lockstep
