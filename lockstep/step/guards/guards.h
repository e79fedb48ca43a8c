// SPDX-License-Identifier: Apache-2.0
// step/guards/guards.h: finds careless programs, whose ranks would silently train different models or with wrong
// gradients. Checks stand at two seams: before the gradients leave a rank, and after those of all ranks have come.
//
//   seam               finds                                                                    where
//   before_exchange()  a parameter without a gradient, if none may be unused                    here
//   settings()         through buckets: settings, frozen parameters, or hand-written parameters
//                      that differ between ranks; a step() that some ranks left out             here
//   after_exchange()   a layer that was unfrozen or added; shared parameters written by hand    here
//                      with LOCKSTEP_CHECK: parameters that differ in a bit                     step_check.h
//   begin_update()     gradients or shared parameters written since backward()                  the exchange
//
// Flow:    DistributedDataParallel -> here
// Threads: one thread
// Ranks:   all ranks make the same calls in the same order
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/model/parameter_block.h"
#include "lockstep/named_tensor.h"
#include "lockstep/optimizer.h"
#include "lockstep/step/guards/step_check.h"
#include "lockstep/step/layout.h"
#include "lockstep/step/step_agreement.h"
#include "lockstep/world.h"

namespace lockstep {

class Guards {
 public:
  // optimizer: null if DistributedDataParallel was given none. Collective: blocks. Throws MismatchError: LOCKSTEP_CHECK
  // differs between ranks.
  Guards(World world, std::vector<NamedTensor> parameters, const torch::optim::Optimizer* optimizer, StepLayout layout);

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
    std::int64_t writes = 0;
    std::uint64_t samples = 0;
    bool operator==(const Values&) const = default;
  };

  Values values() const;
  void note_own_way(const Values& values, bool accumulates);
  void note_values();
  void require_none_unfrozen() const;
  void require_none_added() const;

  World world_;
  StepCheck check_;
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> frozen_;  // when this was made
  const torch::optim::Optimizer* optimizer_;
  const Optimizer* fused_;  // the same, if it is one of lockstep's
  std::size_t held_;        // parameters of the optimizer, when this was made
  StepLayout layout_;
  std::shared_ptr<ParameterBlock> block_;
  double number_;                      // of the DistributedDataParallel: no other of the same ranks has it
  Values values_;                      // after the last exchange
  std::uint64_t calls_ = 0;            // of step() of lockstep's optimizer until then
  std::optional<Values> unexchanged_;  // at the last backward() in no_sync() since then
  bool goes_own_way_ = false;          // parameters may differ between the ranks
};

}  // namespace lockstep
