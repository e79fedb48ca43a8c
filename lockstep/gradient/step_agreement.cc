// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/step_agreement.h"

#include <xxhash.h>

#include <array>
#include <atomic>

#include "lockstep/base/defects.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kSettings = 126;  // that can be named; the hash is of all

}  // namespace

std::uint64_t hash_of(const StepSettings& settings) {
  std::string text;
  for (const auto& [name, value] : settings)
    text.append(name).append(reinterpret_cast<const char*>(&value), sizeof value);
  return XXH3_64bits(text.data(), text.size());
}

// Read by other ranks while they write an error, even if this rank has gone on meanwhile: hence atomic.
struct StepAgreement::Slot {
  std::atomic<std::uint64_t> step;
  std::atomic<std::uint64_t> count;
  std::array<std::atomic<double>, kSettings> values;
};

StepAgreement::StepAgreement(std::shared_ptr<SharedMemory> memory) : memory_(std::move(memory)) {
  if (memory_->size() > 1) slots_ = memory_->allocate_common(sizeof(Slot) * static_cast<unsigned>(memory_->size()));
}

StepAgreement::Slot& StepAgreement::slot(int rank) const { return reinterpret_cast<Slot*>(slots_.get())[rank]; }

void StepAgreement::wait(const Signature& announced) const {
  try {
    memory_->barrier(announced);
  } catch (const MismatchError& error) {
    ErrorText text = error.text();
    text.likely =
        "a rank that left out a backward(), step() or parameters_written() which others made: after a NaN check "
        "of its own, an exception that it caught, or in no_sync()";
    text.next = "let all ranks decide alike: all_reduce the condition first";
    throw MismatchError(text);
  }
}

void StepAgreement::backward() { wait(signature_of(StepPhase::kBackward, ++backwards_)); }

void StepAgreement::step(const StepSettings& settings) {
  ++steps_;
  if (memory_->size() == 1) return;
  if (defect("barrier 2 is left out")) return;
  write_slot(settings);
  try {
    wait(signature_of(StepPhase::kStep, steps_, defect("the hash of the settings is stale") ? 0 : hash_of(settings)));
  } catch (const MismatchError&) {
    compare_slots(settings);
    throw;
  }
}

void StepAgreement::end_step() { wait(signature_of(StepPhase::kStepEnd, steps_)); }

void StepAgreement::write_slot(const StepSettings& settings) {
  Slot& own = slot(memory_->rank());
  std::size_t i = 0;
  for (const auto& [name, value] : settings)
    if (i < kSettings) own.values[i++].store(value, std::memory_order_relaxed);
  own.count.store(settings.size(), std::memory_order_relaxed);
  own.step.store(steps_, std::memory_order_relaxed);
}

// Throws MismatchError naming the first setting in which a rank of the same step differs from this one.
void StepAgreement::compare_slots(const StepSettings& settings) const {
  for (int rank = 0; rank < memory_->size(); ++rank) {
    const Slot& other = slot(rank);
    if (other.step.load(std::memory_order_relaxed) != steps_) continue;
    std::size_t i = 0;
    for (const auto& [name, value] : settings) {
      if (i == kSettings || other.count.load(std::memory_order_relaxed) != settings.size()) break;
      const double theirs = other.values[i++].load(std::memory_order_relaxed);
      if (theirs == value) continue;
      throw MismatchError({.what = concat("step() number ", steps_, " with different settings: ", name, " is ", value,
                                          " on rank ", memory_->rank(), ", ", theirs, " on rank ", rank),
                           .here = concat("rank ", memory_->rank(), " of ", memory_->size(), " on this machine"),
                           .likely = "a schedule, or a decision such as a warm restart, that depends on the rank",
                           .next = "compute it from what all ranks have in common, or broadcast it"});
    }
  }
}

}  // namespace lockstep
