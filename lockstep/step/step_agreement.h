// SPDX-License-Identifier: Apache-2.0
// step/step_agreement.h: the barriers of a training step, for ranks that share parameters. A rank that leaves out a
// step() or backward(), or that has another learning rate, gets an error on every rank before anything is written.
//
// Flow:    published.cc, buckets.cc -> here -> SharedMemory::barrier
// Owns:    shared memory for each rank's settings
// Threads: one thread
// Ranks:   the ranks that share parameters make the same calls in the same order
//
// Every barrier announces what it belongs to: its phase, its number and a hash of the settings (call.h). The ranks of a
// group compare announcements anyway, so this costs nothing. If they differ, every rank reads the settings of the others,
// to name the one that differs: a rank writes them, and its slot, before it announces its step().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/collective/shared_memory.h"
#include "lockstep/error.h"
#include "lockstep/model/parameter_block.h"

namespace lockstep {

// A setting that all ranks must have alike in a step, such as "lr of parameter group 0". Made in each step, so without texts.
struct StepSetting {
  const char* name;  // a literal
  double value;      // NaN: this rank has none, and is not compared
  int group = -1;    // of parameters; -1: of none. Of kFrozen: which 48 parameters
};
using StepSettings = std::vector<StepSetting>;

// Adds whether parameter `number` is frozen; they come in order. A setting has the bits of 48 of them.
inline constexpr const char kFrozen[] = "which parameters are frozen";
void add_frozen(StepSettings& settings, int number, bool is_frozen);

// A hash of parameters of which each rank has a copy.
inline constexpr const char kParameters[] = "the parameters";

// The steps of an optimizer so far. Barrier 2 compares each step; without it the next exchange compares this.
struct StepState {
  uint64_t calls = 0;          // of step()
  uint32_t last_settings = 0;  // hash_of() the settings of the last one
};

uint64_t hash_of(const StepSettings& settings);  // of names and values

// Throws MismatchError naming the first setting of which rank `other` has another value. what: such as "step() number 3".
void require_same_settings(const StepSettings& own, int rank, std::span<const double> theirs, int other,
                           const std::string& what, const std::string& here);

// The error of ranks that make different calls: says what is likely, and what to do next.
MismatchError calls_differ(ErrorText text);

// Adds whether this rank has written the mean in .grad by hand. It comes first: parameters that differ are only the consequence.
StepSettings with_mean_changed(StepSettings settings, bool changed);

class StepAgreement {
 public:
  // block: the shared parameters, writable only between begin_update() and end_update(); null: not looked after. Collective;
  // blocks.
  explicit StepAgreement(SharedMemoryPtr memory, std::shared_ptr<ParameterBlock> block = nullptr);

  // Throws UsageError naming a parameter that was moved, or written by hand since the last step.
  void require_parameters_untouched() const;

  // Each blocks until all ranks are there. Throws MismatchError on all ranks, naming what differs; PeerLost.
  void end_backward();                              // barrier 1: gradients may be read
  void in_mean(StepPhase phase);                    // between barriers 1 and 2, where the mean is asked for
  void begin_update(const StepSettings& settings);  // barrier 2: then this rank may write its slice
  void end_update();                                // barrier 3: every slice is written

 private:
  struct Slot;
  Slot& slot(int rank) const;
  void wait(const Signature& announced) const;
  void write_slot(const StepSettings& settings);
  void compare_slots(const StepSettings& settings) const;

  SharedMemoryPtr memory_;
  std::shared_ptr<ParameterBlock> block_;
  std::shared_ptr<std::byte> slots_;       // one per rank
  std::vector<SharedMemory::Own> values_;  // of this rank's settings: the last one; others may still read older ones
  size_t room_ = 0;                        // for so many
  uint64_t backwards_ = 0;
  uint64_t steps_ = 0;
};

}  // namespace lockstep
