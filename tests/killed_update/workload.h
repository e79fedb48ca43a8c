// SPDX-License-Identifier: Apache-2.0
// tests/killed_update/workload.h: updates of a few parameters that share memory between ranks, in a process that may be killed;
// and what is found afterwards in that memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/collective/shared_memory.h"
#include "lockstep/optimizers.h"
#include "lockstep/step/update/flat_update.h"
#include "lockstep/step/update/update_journal.h"

namespace lockstep::testing {

struct UpdateCase {
  std::string name;
  OptimizerOptions options;
  torch::ScalarType dtype = torch::kFloat32;
  ClippingOptions clipping{};
  std::optional<double> loss_scale{};
  bool overflows = false;  // in the last step
  double ema_decay = 0;
  int ranks = 1;
  int threads = 1;          // of each rank
  int threads_at_last = 0;  // in the last step; 0: as before
  int group_without = -1;   // this group has no momentum after the first step (SGD)
  std::vector<int64_t> sizes{};
};
inline void PrintTo(const UpdateCase& each, std::ostream* out) { *out << each.name; }

inline constexpr int kSteps = 3;  // the last of them is disturbed

// One rank's parameters, state and gradients, in `memory`.
class Workload {
 public:
  Workload(std::shared_ptr<SharedMemory> memory, const UpdateCase& given, bool kept);

  void fill_gradients(int step);  // collective
  void update(int step);

  const OptimizerState& state() const { return state_; }
  std::string manifest() const { return flat_->journal().manifest(); }
  SharedMemory& memory() { return *memory_; }

 private:
  std::vector<UpdateRule::Group> groups_in(int step) const;
  const void* gradient_of(int step, size_t parameter, int rank) const;

  std::shared_ptr<SharedMemory> memory_;
  UpdateCase case_;
  OptimizerState state_;
  std::unique_ptr<FlatUpdate> flat_;
  std::unique_ptr<UpdateRule> rule_;
  std::vector<SharedMemory::Own> gradients_;
  std::shared_ptr<std::byte> places_;  // [rank][parameter]
};

// Every bit of a state.
std::string image_of(const OptimizerState& state);

// Memory that outlives the ranks, mapped here: a file for each.
class Arenas {
 public:
  Arenas() = default;
  explicit Arenas(const std::vector<UniqueFd>& files);
  ~Arenas();
  Arenas(const Arenas&) = delete;
  Arenas& operator=(const Arenas&) = delete;

  std::byte* find(const SharedMemory::ArenaOffset& place, size_t bytes) const;
  std::span<std::byte> of(int rank) const { return mapped_.at(static_cast<size_t>(rank)); }

 private:
  std::vector<std::span<std::byte>> mapped_;
};

// The arenas of a process whose ranks are threads.
std::vector<UniqueFd> arenas_of(pid_t process, int ranks);

}  // namespace lockstep::testing
