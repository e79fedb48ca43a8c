// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/program.h: a program over the public API of a training step, as data. Everything in which ranks
// differ is explicit: each operation says which ranks make it, and with how many samples each.
#pragma once

#include <torch/types.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::fuzz {

inline constexpr int kMaxRanks = 5;
inline constexpr int kMaxParameters = 8;

using Ranks = unsigned;  // bit r: rank r
inline Ranks all_of(int ranks) { return (1U << ranks) - 1; }
inline bool has(Ranks ranks, int rank) { return (ranks >> rank & 1) != 0; }

// Where the gradients meet, and whose parameters they update. kTorch: an optimizer of torch's, parameters of each rank.
enum class Layout : uint8_t { kShared, kSharedThroughBuckets, kSeparate, kTorch };
enum class Rule : uint8_t { kSGD, kMomentum, kNesterov, kAdam, kAdamW, kLAMB, kLARS };
enum class Hook : uint8_t { kNone, kTopKOfAll, kFloat16, kBFloat16, kTopK, kTwoBit, kPowerSGD };
enum class Norm : uint8_t { kNone, kOfRank, kSynchronised };  // batch normalisation

inline constexpr double kTopKShare = 0.3, kTwoBitThreshold = 0.2;  // and PowerSGD of rank 1
inline constexpr size_t kSmallBucket = 32;                         // bytes

// One module with its optimizer and its DistributedDataParallel.
struct TrainerPlan {
  Layout layout = Layout::kShared;
  Rule rule = Rule::kSGD;
  torch::ScalarType dtype = torch::kFloat64;
  double lr = 0.1;
  double weight_decay = 0;
  double average = 0;        // keep_average(); 0: none
  bool scaled = false;       // with a GradientScaler
  int shards = 0;            // virtual shards of each rank
  Hook hook = Hook::kNone;   // through buckets
  bool mean_in_grad = true;  // shared through buckets: the option; else as the ranks are on several machines
  bool small_buckets = false;
  bool bucket_view = false;
  bool wide = false;     // gradients large enough for autograd to write them into shared memory
  bool buffers = false;  // the module has a buffer that forward() changes
  Norm norm = Norm::kNone;
  bool alike = false;                  // ranks count alike, as in Python by default; every backward() is in halves
  bool words = false;                  // the module has an embedding with sparse gradients
  unsigned frozen = 0;                 // parameters frozen before the DistributedDataParallel is made
  int groups = 1;                      // of lockstep's optimizer
  bool untold = false;                 // the DistributedDataParallel is not given torch's optimizer, as in Python
  std::array<int, kMaxRanks> color{};  // the sub-world of each rank
  std::array<int, kMaxRanks> destruction{};  // in which order each rank destroys its objects: 0 to 5
};

enum class Action : uint8_t {
  kBackward,         // ddp.backward(): samples, unused, overflow
  kNoSyncBackward,   // the same, under no_sync()
  kPlainBackward,    // loss.backward()
  kFailingForward,   // throws before there is a loss; the program goes on
  kFailingBackward,  // throws halfway through; the program catches it and goes on
  kOldGraph,         // forward; a whole step; then ddp.backward() of the loss from before it
  kStep,
  kZeroGrad,         // to none
  kZeroGradToZeros,  // set_to_none = false
  kSetLr,            // value
  kSetLastLr,        // value: of the last parameter group
  kLoadState,        // of torch's optimizer: another one
  kSetClipping,      // value: the norm
  kSetValueClipping,
  kMeanGradients,   // ddp.mean_gradients()
  kClipNormByHand,  // torch's clip_grad_norm_ with value
  kClipValueByHand,
  kFreeze,  // frozen_by()
  kUnfreeze,
  kKeepAverage,     // after the first step
  kLoadParameters,  // every rank writes the same values; then parameters_written()
  kSave,            // remembers parameters, the optimizer's state and buffers
  kResume,          // writes them back; then parameters_written()
  kWriteParameter,  // p *= 0.5 under NoGradGuard
  kWriteData,       // p.data() *= 0.5
  kJoin,
  kRebuild,  // destroys optimizer and DistributedDataParallel and makes new ones for the same module
  kCount,
};

struct Operation {
  Action action = Action::kStep;
  int trainer = 0;
  Ranks ranks = 0;                   // which make it
  int id = 0;                        // seeds its inputs: stays when others are removed
  std::array<int, kMaxRanks> ids{};  // of each rank, where ranks meet from several operations; 0: id
  double value = 0;
  int parameter = 0;
  unsigned set = 0;  // of kFreeze: parameters; 0: the one above
  std::array<int, kMaxRanks> samples{};
  std::array<unsigned, kMaxRanks>
      unused{};         // Branch in network.h: parts of the model that this rank's forward leaves out
  Ranks overflow = 0;   // these ranks' loss is infinite
  bool halves = false;  // of kBackward and kNoSyncBackward: begin_backward() in a hook, and end_backward()
};

struct Program {
  uint64_t seed = 0;
  int ranks = 1;
  bool processes = false;  // ranks are processes, not threads
  int machines = 1;        // that the threads count as
  bool in_turn = false;    // rank r is on machine r % machines; else each machine has consecutive ranks
  std::vector<TrainerPlan> trainers;
  std::vector<Operation> operations;  // the last kEnd of each trainer are plain steps
};

// Two steps of every rank end each trainer's operations: what is illegal shows by then on every rank, and buffers are
// exchanged.
inline constexpr size_t kEnd = 6;

// Samples of shard `shard` of this rank: shards of a rank differ.
inline int samples_of_shard(const Operation& operation, int rank, int shard) {
  return (operation.samples[static_cast<size_t>(rank)] + 2 * shard) % 5;
}
inline int id_of(const Operation& operation, int rank) {
  const int own = operation.ids[static_cast<size_t>(rank)];
  return own != 0 ? own : operation.id;
}
inline unsigned frozen_by(const Operation& operation) {
  return operation.set != 0 ? operation.set : 1U << operation.parameter;
}
inline bool is_backward(Action action) {
  return action == Action::kBackward || action == Action::kNoSyncBackward || action == Action::kPlainBackward;
}
inline bool in_shared_memory(const TrainerPlan& plan) { return plan.layout == Layout::kShared; }
inline bool keeps_residual(const TrainerPlan& plan) {
  return plan.hook == Hook::kTopK || plan.hook == Hook::kTwoBit || plan.hook == Hook::kPowerSGD;
}
inline bool is_layerwise(const TrainerPlan& plan) { return plan.rule == Rule::kLAMB || plan.rule == Rule::kLARS; }
inline bool shares_parameters(const TrainerPlan& plan) {
  return plan.layout == Layout::kShared || plan.layout == Layout::kSharedThroughBuckets;
}

std::vector<int> machines_of(const Program& program);  // of each rank
std::string name_of(Action action);
std::string name_of(Layout layout);
std::string name_of(Rule rule);
std::string text_of(const Program& program);                   // for a reader who wants to write it as a test
std::vector<std::string> features_of(const Program& program);  // what occurs in it, each once

}  // namespace lockstep::fuzz
