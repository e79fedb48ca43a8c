// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/meetings.h"

#include <algorithm>
#include <bit>
#include <deque>

namespace lockstep::fuzz {
namespace {

bool is_exchange(Action action) { return action == Action::kBackward || action == Action::kPlainBackward; }

// Calls in which the ranks wait for each other.
bool is_meeting(Action action) {
  return is_exchange(action) || action == Action::kJoin || action == Action::kLoadParameters ||
         action == Action::kResume || action == Action::kRebuild;
}

// What a rank may do by itself, and goes on after.
bool is_local(Action action) {
  return !is_meeting(action) && action != Action::kFailingBackward && action != Action::kOldGraph &&
         action != Action::kKeepAverage;
}

class Meetings {
 public:
  Meetings(const Program& program, size_t trainer, int color) : program_(program), trainer_(static_cast<int>(trainer)) {
    for (int rank = 0; rank < program.ranks; ++rank) {
      if (program.trainers[trainer].color[static_cast<size_t>(rank)] != color) continue;
      members_ |= 1U << rank;
      for (const Operation& operation : program.operations)
        if (operation.trainer == trainer_ && has(operation.ranks, rank)) next_of(rank).push_back(operation);
    }
  }

  std::optional<Program> run() {
    do {
      run_local_operations();
    } while (meet());
    if (!finished()) return std::nullopt;
    Program program = program_;
    program.operations = std::move(met_);
    return program;
  }

 private:
  // Steps last, so that those of different ranks are one.
  void run_local_operations() {
    do {
      for (int rank = 0; rank < program_.ranks; ++rank)
        while (has(active(), rank) && !next_of(rank).empty() && is_local(next_of(rank).front().action) &&
               next_of(rank).front().action != Action::kStep)
          run_local_operation(next_of(rank).front());
      const Ranks stepping = heads([](const Operation& head) { return head.action == Action::kStep; });
      if (stepping == 0) return;
      execute(next_of(std::countr_zero(stepping)).front(), stepping);
    } while (true);
  }

  void run_local_operation(Operation first) {
    execute(first, heads([&](const Operation& head) {
              return head.action == first.action && head.value == first.value && head.parameter == first.parameter &&
                     head.set == first.set;
            }));
  }

  // Returns whether the ranks have met.
  bool meet() {
    if (const Ranks joining = heads([](const Operation& head) { return head.action == Action::kJoin; }); joining != 0) {
      execute(next_of(std::countr_zero(joining)).front(), joining);
      joined_ |= joining;
      if (joined_ == members_) joined_ = 0;
      return true;
    }
    const int first = std::countr_zero(active());
    if (next_of(first).empty()) return false;
    const Operation operation = next_of(first).front();
    if (joined_ != 0 && !is_exchange(operation.action)) return false;
    const auto meets = [&](const Operation& other) {
      return is_exchange(operation.action) ? other.action == operation.action : other.id == operation.id;
    };
    if (heads(meets) != active()) return false;
    execute(operation, active());
    return true;
  }

  // The active ranks whose next operation is of this kind.
  Ranks heads(const auto& is) {
    Ranks ranks = 0;
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (has(active(), rank) && !next_of(rank).empty() && is(next_of(rank).front())) ranks |= 1U << rank;
    return ranks;
  }

  // Takes the next operation of each of these ranks as one.
  void execute(Operation operation, Ranks ranks) {
    operation.ranks = ranks;
    operation.overflow = 0;
    operation.halves = false;
    for (int rank = 0; rank < program_.ranks; ++rank) {
      if (!has(ranks, rank)) continue;
      const Operation own = next_of(rank).front();
      next_of(rank).pop_front();
      const auto r = static_cast<size_t>(rank);
      operation.ids[r] = own.id;
      operation.samples[r] = own.samples[r];
      operation.unused[r] = own.unused[r];
      operation.overflow |= own.overflow & 1U << rank;
      operation.halves = operation.halves || (own.halves && own.samples[r] > 0);
    }
    met_.push_back(operation);
  }

  bool finished() const {
    return joined_ == 0 && std::ranges::all_of(next_, [](const auto& operations) { return operations.empty(); });
  }
  Ranks active() const { return members_ & ~joined_; }
  std::deque<Operation>& next_of(int rank) { return next_[static_cast<size_t>(rank)]; }

  const Program& program_;
  int trainer_;
  Ranks members_ = 0, joined_ = 0;
  std::array<std::deque<Operation>, kMaxRanks> next_;
  std::vector<Operation> met_;
};

}  // namespace

std::optional<Program> as_ranks_meet(const Program& program, size_t trainer, int color) {
  return Meetings(program, trainer, color).run();
}

}  // namespace lockstep::fuzz
