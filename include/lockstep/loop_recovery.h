// SPDX-License-Identifier: Apache-2.0
// lockstep/loop_recovery.h: a training loop of your own that survives the loss of ranks, under
// `lockstep run --max-restarts N -- PROGRAM`. Three lines more than a loop without it:
//
//   int main() {
//     return lockstep::recover([] {                                                        // 1
//       auto world = lockstep::World::from_env();
//       ... model, optimizer, ddp and loader, as usual
//       lockstep::Recovery recovery(ddp, optimizer, loader);                               // 2
//       for (auto epoch = recovery.epoch(); epoch < epochs; ++epoch) {
//         for (auto& batch : recovery.batches(epoch)) {
//           ... forward, ddp.backward(), optimizer.step(), optimizer.zero_grad()
//           recovery.step();                                                               // 3
//         }
//         ... validation, output, what else ends an epoch
//       }
//       return 0;
//     });
//   }
//
// When a rank dies, the launcher starts another in its place, and the function starts over on every rank: on the new one for
// the first time, on the others once its World, model and loader are gone. Recovery then puts back what it has kept in memory
// that the launcher holds, and all go on after that step, with the bits of an undisturbed run. What the program did
// since is repeated: the steps since the last copy (copies take at most 1 % of the time, so small models are copied after each
// step), and what follows the last step of an epoch. Collectives are repeated by all ranks together. Call
// torch::manual_seed() in the function: before the first copy it starts from nothing.
//
// Kept: parameters, buffers, the optimizer's state and options, the random generators of torch, the place in the data; and what is
// given to keep(), such as a GradientScaler. Not kept, so begin with it in the function, or compute it from epoch() and steps(): the
// learning rate of a schedule of torch's, the residuals of a CommunicationHook, variables of the program, generators that are
// not torch's. Where ranks have different parameters (lockstep/periodic_average.h), this is not for them.
//
// Flow:    ddp, optimizer, loader -> memory of the launcher -> the same objects in the next run of the function
// Owns:    two copies of the state on each machine, in shared memory
// Threads: one thread
// Ranks:   all ranks make the same calls in the same order
#pragma once

#include "lockstep/ddp.h"
#include "lockstep/gradient_scaler.h"
#include "lockstep/loader.h"

namespace lockstep {

struct RecoveryOptions {
  double share_of_time = 0.01;  // that copies may take; 1: after each step
};

class Recovery {
 public:
  using Options = RecoveryOptions;

  // After `ddp` is made, with its optimizer. Puts back what was kept of it, if that was another run's beginning. Blocks.
  // Throws CheckpointError (another model or optimizer than was kept), PeerLost.
  Recovery(DistributedDataParallel& ddp, torch::optim::Optimizer& optimizer, const Options& options = {});
  Recovery(DistributedDataParallel& ddp, torch::optim::Optimizer& optimizer, Loader& loader,
           const Options& options = {});
  ~Recovery();
  Recovery& operator=(Recovery&&) = delete;

  // Also keeps this, and puts it back at once. Before the first step(). Each rank has its own; one that has lost its machine
  // gets the first rank's. value: outlives this. save, load: any bytes. Throws CheckpointError: it was not kept, or had another shape.
  template <class Number>
  requires std::integral<Number> || std::floating_point<Number>
  void keep(const std::string& name, Number& value) {
    keep(
        name, [&value] { return std::string(reinterpret_cast<const char*>(&value), sizeof value); },
        [&value](const std::string& saved) { saved.copy(reinterpret_cast<char*>(&value), sizeof value); });
  }
  void keep(const std::string& name, const Tensor& value);
  void keep(const std::string& name, GradientScaler& scaler);  // of this optimizer: without it step() is an error
  void keep(const std::string& name, std::function<std::string()> save, std::function<void(const std::string&)> load);

  // The epoch to go on with; 0 in the beginning. With a loader.
  int64_t epoch() const;

  // The loader's batches of this epoch; of epoch(), those that are left. Throws UsageError: an epoch before epoch().
  Loader::Epoch batches(int64_t epoch);

  int64_t steps() const;  // that were made, also before a loss

  // After each optimizer.step() and all that belongs to it, such as zero_grad() and schedules; of batches whose gradients add
  // up to one step, after the last. Keeps the state when it is time to. Blocks then until all ranks have. Throws PeerLost;
  // UsageError: the loop does not go on where epoch() and batches() say, or its GradientScaler was not given to keep();
  // SystemError: no memory left.
  void step();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
