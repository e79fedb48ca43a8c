// SPDX-License-Identifier: Apache-2.0
// step/guards/guards.h: finds careless programs, whose ranks would silently train different models or with wrong
// gradients. Checks stand at two seams: before the gradients leave a rank, and after those of all ranks have come.
//
//   seam               finds                                                                    where
//   before_exchange()  a parameter without a gradient, if none may be unused                    here
//   settings()         through buckets: settings, frozen parameters, or hand-written parameters
//                      that differ between ranks; a step() that some ranks left out             here
//   after_exchange()   a layer that was unfrozen or added; shared parameters written by hand    here
//                      with LOCKSTEP_CHECK: parameters that differ in a bit                     StepCheck
//   begin_update()     gradients or shared parameters written since backward()                  the exchange
//
// Flow:    DistributedDataParallel -> here
// Threads: one thread
// Ranks:   all ranks make the same calls in the same order
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "lockstep/base/process/page_guard.h"
#include "lockstep/model/parameter_block.h"
#include "lockstep/named_tensor.h"
#include "lockstep/optimizer.h"
#include "lockstep/step/layout.h"
#include "lockstep/step/step_agreement.h"
#include "lockstep/world.h"

namespace lockstep {

// LOCKSTEP_CHECK=n: every n-th exchange compares the parameters of all ranks bit by bit, by an all-gather of hashes.
// The parameters compared are those that the last step() left, in every layout: shared by the ranks of a machine or
// each rank's own, on one machine or several. base/process/page_guard.h is the other half of LOCKSTEP_CHECK.
class StepCheck {
 public:
  // Blocks. Sends 8 bytes per rank. Throws MismatchError: LOCKSTEP_CHECK differs between ranks.
  explicit StepCheck(World world, int interval = check_interval());

  // Every n-th call compares; it blocks then, and sends 8 bytes per parameter and rank. Throws MismatchError on all
  // ranks, naming the first parameter that differs and the ranks.
  void exchanged(const NamedTensors& parameters);

  // Compares now. `when` is for the error: "after 3 exchanges".
  void compare(const NamedTensors& parameters, const std::string& when) const;

  // A hash of a part of the parameters' bytes, another part at each exchange: of 4 KiB or a hundredth of all, whichever is
  // more. So a hundred exchanges see each byte. 0: none is on the CPU, or LOCKSTEP_CHECK is 0.
  double hash_of_part(const NamedTensors& parameters) const;

 private:
  World world_;
  int interval_;
  size_t exchanges_ = 0;
};

class Guards {
 public:
  // optimizer: null if DistributedDataParallel was given none. Collective: blocks. Throws MismatchError: LOCKSTEP_CHECK
  // differs between ranks.
  Guards(World world, NamedTensors parameters, const torch::optim::Optimizer* optimizer, StepLayout layout);

  // The parameters have their values and their place. block: null unless they are shared.
  void begin(std::shared_ptr<ParameterBlock> block);

  // A backward() in no_sync() begins.
  void before_accumulating();

  // This rank's gradients are there and are about to leave. Throws UsageError naming those that are missing.
  void require_all_gradients() const;

  // Returns the settings that all ranks must have alike when gradients go through buckets.
  StepSettings settings();

  // The gradients of all ranks are there, in .grad or published. Throws UsageError, MismatchError.
  void after_exchange();

  // All ranks have written parameters. Throws MismatchError on all, naming one whose values differ.
  void require_same_values() const { check_.compare(parameters_, "after write_parameters()"); }

  // All ranks have written the same values into parameters.
  void parameters_written();

  bool has_copies() const;  // some ranks have parameters of their own

 private:
  // Traces of writes to parameters: how often, by their version counters; and a hash of some elements of each,
  // because torch's optimizers write through data(), which counts nothing.
  struct Values {
    int64_t writes = 0;
    uint64_t samples = 0;
    bool operator==(const Values&) const = default;
  };

  Values values() const;
  void note_own_way(const Values& values, bool accumulates);
  void note_values();
  void require_none_unfrozen() const;
  void require_none_added() const;

  World world_;
  StepCheck check_;
  NamedTensors parameters_;
  NamedTensors frozen_;  // when this was made
  const torch::optim::Optimizer* optimizer_;
  const Optimizer* fused_;  // the same, if it is one of lockstep's
  size_t held_;             // parameters of the optimizer, when this was made
  StepLayout layout_;
  std::shared_ptr<ParameterBlock> block_;
  double number_;                      // of the DistributedDataParallel: no other of the same ranks has it
  Values values_;                      // after the last exchange
  uint64_t calls_ = 0;                 // of step() of lockstep's optimizer until then
  std::optional<Values> unexchanged_;  // at the last backward() in no_sync() since then
  bool goes_own_way_ = false;          // parameters may differ between the ranks
};

// ---- Whether the module, the optimizer and the options that a DistributedDataParallel is made of fit together

// Returns the parameters of all groups.
Tensors parameters_of(const torch::optim::Optimizer& optimizer);

// Throws UsageError naming one that is no parameter or buffer of the module.
void require_known_names(const torch::nn::Module& module, const std::set<std::string>& names);

// Throws UsageError unless the optimizer holds parameters of the module and, if it steps shared parameters, none that is
// ignored.
void require_fitting(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module, bool shares,
                     const std::set<std::string>& ignored);

}  // namespace lockstep
