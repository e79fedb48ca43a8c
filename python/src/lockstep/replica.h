// SPDX-License-Identifier: Apache-2.0
// One rank's copy of a Python model: C++'s DistributedDataParallel, and the hooks through which Python's own
// loss.backward() begins and ends an exchange.
//
// Flow:    forward -> watch(outputs) -> autograd reaches an output: begin_backward() -> ... -> the end of backward()
// Owns:    a C++ module tree with the Python model's own parameters, the exchange, the optimizer's C++ side
// Threads: one thread; hooks run on autograd's thread, without the GIL
// Ranks:   every rank makes it at the same time and makes the same calls in the same order
//
// Note [Samples]
// A backward() counts the samples of every forward whose outputs it passes through. Which those are is known when it
// begins: autograd has the set of all nodes it is going to visit, and each watched output is a node. A forward that no
// backward() follows therefore counts nothing. By default these numbers are only compared, for a warning. It begins at the first output, or at the gradient of a parameter if that
// comes before, as that of a norm of parameters in the loss.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/ddp.h"
#include "lockstep/observe/phase_scope.h"
#include "lockstep/optimizer.h"
#include "lockstep/world.h"

namespace lockstep::python {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

// The weight of this rank's loss in the mean over all ranks: of the backward() that goes on; outside of one 1, as torch's
// DistributedDataParallel counts.
double loss_weight();

class Replica : public std::enable_shared_from_this<Replica> {
 public:
  // optimizer: null if it is not one of lockstep's. by_samples: ranks count by dimension 0 of what forward() was given;
  // else alike. Blocks; throws as DistributedDataParallel.
  Replica(const World& world, const NamedTensors& parameters, const NamedTensors& buffers,
          std::shared_ptr<Optimizer> optimizer, const DistributedDataParallelOptions& options, bool by_samples);
  ~Replica();
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  void watch_parameters();  // once, when a shared_ptr owns this

  void enter_forward(bool training) {
    if (training) observe::begin_next_step();
    forward_.emplace(training ? Phase::kForward : Phase::kValidating);
  }
  void leave_forward() { forward_.reset(); }

  // After a forward: its outputs, and dimension 0 of its inputs; NaN: they differ, or have none.
  void watch(const std::vector<torch::Tensor>& outputs, double size);

  // The next backward() counts this many samples, whatever its forwards did.
  void set_samples(std::int64_t samples);

  // Takes part in an exchange without a backward(). joined: where ranks count alike, this one still does. Blocks.
  void skip_batch(bool joined);

  void set_no_sync(bool on);
  bool no_sync() const { return no_sync_ != nullptr; }

  // Whether the last backward() was one whose gradients are still to be exchanged.
  bool accumulates() const { return accumulates_; }

  DistributedDataParallel& ddp() { return ddp_; }

 private:
  struct Forward {
    double size;
    bool exchanges;
  };
  // An output of a forward; lives as long as its node.
  struct Output {
    const torch::autograd::Node* node;
    std::shared_ptr<const Forward> forward;
  };
  using NoSyncGuard = std::unique_ptr<DistributedDataParallel::NoSync>;
  class Hook;
  class Backward;

  // Autograd has reached an output, or the gradient of a parameter (null).
  void begin(const Output* reached);
  torch::Tensor scaled(const torch::Tensor& gradient);
  bool adds_to_parameters() const;
  std::vector<const Forward*> forwards_of_this_backward(const Output* reached) const;
  BatchWeight weight_of(const std::vector<const Forward*>& forwards);
  NoSyncGuard begin_no_sync();

  World world_;
  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<Optimizer> optimizer_;
  DistributedDataParallel ddp_;
  std::optional<PhaseScope> forward_;
  bool by_samples_;
  std::vector<torch::Tensor> parameters_;
  std::vector<std::weak_ptr<const Output>> outputs_;  // of forwards whose graph still exists
  std::optional<std::int64_t> given_samples_;
  NoSyncGuard no_sync_;
  bool in_backward_ = false;
  bool accumulates_ = false;
  double factor_ = 1;  // of the gradients of this backward()
  std::vector<std::pair<std::shared_ptr<torch::autograd::Node>, Hook*>> on_gradient_;  // of parameters_
};

}  // namespace lockstep::python
