// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/step_agreement.h"

#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <string_view>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr int kFrozenBits = 48;  // of one setting: exact in a double

std::string difference(const StepSetting& own, int rank, double theirs, int other) {
  const auto& [name, value, group] = own;
  const std::string ranks = concat("rank ", rank, " and rank ", other);
  if (name == std::string_view(kParameters)) return concat("the parameters of ", ranks, " differ");
  if (name != std::string_view(kFrozen))
    return concat(name, group < 0 ? "" : concat(" of parameter group ", group), " is ", value, " on rank ", rank, ", ",
                  theirs, " on rank ", other);
  const int bit = std::countr_zero(static_cast<uint64_t>(value) ^ static_cast<uint64_t>(theirs));
  return concat(name, " differs between ", ranks, ": number ", group * kFrozenBits + bit);
}

}  // namespace

void add_frozen(StepSettings& settings, int number, bool is_frozen) {
  if (number % kFrozenBits == 0) settings.push_back({kFrozen, 0, number / kFrozenBits});
  if (is_frozen) settings.back().value += std::ldexp(1, number % kFrozenBits);
}

StepSettings with_mean_changed(StepSettings settings, bool changed) {
  settings.insert(settings.begin(), {"gradients written by hand since backward()", changed ? 1.0 : 0.0});
  return settings;
}

uint64_t hash_of(const StepSettings& settings) {
  uint64_t hash = settings.size();
  for (const auto& [name, value, group] : settings) {
    hash = XXH3_64bits_withSeed(name, std::strlen(name), hash + static_cast<uint64_t>(group));
    hash = XXH3_64bits_withSeed(&value, sizeof value, hash);
  }
  return hash;
}

void require_same_settings(const StepSettings& own, int rank, std::span<const double> theirs, int other,
                           const std::string& what, const std::string& here) {
  for (size_t i = 0; i < std::min(own.size(), theirs.size()); ++i) {
    if (own[i].value == theirs[i] || std::isnan(own[i].value) || std::isnan(theirs[i])) continue;
    const bool is_check = own[i].name == std::string_view(kParameters);
    throw MismatchError(
        {.what = concat(what, ": ", difference(own[i], rank, theirs[i], other)),
         .here = here,
         .likely = "a step(), backward(), setting or loaded state that depends on the rank, such as a schedule or a "
                   "warm restart",
         .next = is_check ? "LOCKSTEP_CHECK=1 names the step and the parameter. Where ranks are meant to differ, set "
                            "LOCKSTEP_CHECK=0 on all"
                          : "let all ranks decide alike: all_reduce or broadcast the condition first. After "
                            "writing parameters by hand call parameters_written() on all ranks"});
  }
}

MismatchError calls_differ(ErrorText text) {
  text.likely =
      "a rank that left out a backward(), step() or parameters_written() which others made: after a NaN check "
      "of its own, an exception that it caught, or in no_sync()";
  text.next = "let all ranks decide alike: all_reduce the condition first";
  return MismatchError(text);
}

// Read by other ranks while they write an error, even if this rank has gone on meanwhile: hence atomic.
struct StepAgreement::Slot {
  std::atomic<uint64_t> step;
  std::atomic<uint64_t> count;
  std::atomic<uint64_t> place;  // of so many std::atomic<double> of the rank
};

StepAgreement::StepAgreement(SharedMemoryPtr memory, std::shared_ptr<ParameterBlock> block)
    : memory_(std::move(memory)), block_(std::move(block)) {
  if (memory_->size() > 1) slots_ = memory_->allocate_common(sizeof(Slot) * static_cast<unsigned>(memory_->size()));
}

StepAgreement::Slot& StepAgreement::slot(int rank) const { return reinterpret_cast<Slot*>(slots_.get())[rank]; }

void StepAgreement::wait(const Signature& announced) const {
  try {
    memory_->barrier(announced);
  } catch (const MismatchError& error) {
    throw calls_differ(error.text());
  }
}

void StepAgreement::require_parameters_untouched() const {
  if (!block_) return;
  block_->require_in_place();
  block_->require_same_samples();
}

void StepAgreement::end_backward() { wait(signature_of(StepPhase::kBackward, ++backwards_)); }

void StepAgreement::in_mean(StepPhase phase) { wait(signature_of(phase, backwards_)); }

void StepAgreement::begin_update(const StepSettings& settings) {
  ++steps_;
  if (memory_->size() > 1) {
    write_slot(settings);
    try {
      wait(signature_of(StepPhase::kStep, steps_, hash_of(settings)));
    } catch (const MismatchError&) {
      compare_slots(settings);
      throw;
    }
  }
  if (block_) block_->begin_write();
}

void StepAgreement::end_update() {
  if (block_) block_->end_write();
  wait(signature_of(StepPhase::kStepEnd, steps_));
  if (block_) block_->mark_written();
}

void StepAgreement::write_slot(const StepSettings& settings) {
  if (values_.empty() || settings.size() > room_) {
    room_ = std::max<size_t>(settings.size(), 1);
    values_.push_back(memory_->allocate(room_ * sizeof(double)));
  }
  auto* const values = reinterpret_cast<std::atomic<double>*>(values_.back().data.get());
  for (size_t i = 0; i < settings.size(); ++i) values[i].store(settings[i].value, std::memory_order_relaxed);
  Slot& own = slot(memory_->rank());
  own.place.store(values_.back().place, std::memory_order_relaxed);
  own.count.store(settings.size(), std::memory_order_relaxed);
  own.step.store(steps_, std::memory_order_relaxed);
}

// Throws MismatchError naming the first setting in which a rank of the same step differs from this one.
void StepAgreement::compare_slots(const StepSettings& settings) const {
  for (int rank = 0; rank < memory_->size(); ++rank) {
    const Slot& other = slot(rank);
    if (other.step.load(std::memory_order_relaxed) != steps_) continue;
    const auto count = static_cast<size_t>(other.count.load(std::memory_order_relaxed));
    const auto* const values = reinterpret_cast<const std::atomic<double>*>(
        memory_->peer(rank, other.place.load(std::memory_order_relaxed), count * sizeof(double)));
    std::vector<double> theirs;
    for (size_t i = 0; i < count; ++i) theirs.push_back(values[i].load(std::memory_order_relaxed));
    require_same_settings(settings, memory_->rank(), theirs, rank,
                          concat("step() number ", steps_, " with different settings"),
                          concat("rank ", memory_->rank(), " of ", memory_->size(), " on this machine"));
  }
}

}  // namespace lockstep
