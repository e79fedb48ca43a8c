// lockstep/strategy.h: how the replicas of a model stay one model. The training loop knows only this interface.
//
// Flow:    Task + Batch -> forward_backward(): forward, backward, exchange -> update() -> parameters
// Owns:    the model and the optimizer
// Threads: one thread
// Ranks:   every rank makes the same calls in the same order
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/batch_totals.h"
#include "lockstep/layout.h"
#include "lockstep/model/parameters.h"
#include "lockstep/optimizers.h"
#include "lockstep/task.h"
#include "lockstep/world.h"

namespace lockstep {

// Seconds of this rank, added up since the strategy was made: where a step's time goes.
struct PhaseTimes {
  double forward = 0;
  double backward = 0;  // with the part of the exchange that runs behind it
  double exchange = 0;  // what is left of the exchange after backward
  double update = 0;
};

struct StrategyOptions {
  std::string name = "ddp";
  std::string optimizer = "sgd";  // sgd | adam | adamw | lamb | lars
  SGDOptions sgd;
  AdamOptions adam;
  AdamWOptions adamw;
  LAMBOptions lamb;
  LARSOptions lars;
  ClippingOptions clipping;
  double ema_decay = 0;  // 0: no moving average of the parameters
  std::uint64_t seed = 0;
  std::string precision = "float32";  // or bfloat16: what forward computes in (model/mixed_precision.h)
  std::string layout = "auto";        // auto | contiguous | channels_last
  bool share_parameters = true;       // one copy per machine (lockstep/ddp.h)
  std::string compression = "none";   // of gradients between ranks: none | fp16 | bf16 | powersgd | 2bit | topk
  double compression_amount = 0;      // powersgd: rank, 2bit: threshold, topk: share; 0: its default
  int virtual_shards = 0;             // the same bits whatever the number of ranks (lockstep/ddp.h); 0: off

  // Strategies whose devices are threads of this process:
  int devices = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // how long any wait for a device may take
  std::string algorithm = "direct";                             // towers, ddp: direct | central | ring | tree
  std::string update = "device";                                // towers: on every device (S0), or once on the cpu (S3)
  bool refuse_uneven = false;              // towers: a batch that the devices do not divide is an error
  std::int64_t average_every = 1;          // averaging: batches
  double outer_lr = 1;                     // averaging: 1 and momentum 0 take the average as it is
  double outer_momentum = 0;               // averaging: Nesterov's
  std::string kvstore = "local";           // kvstore: its kind (strategy/kvstore/kvstore_strategy.h)
  int servers = 1;                         // kvstore dist_*: the first ranks of the world are servers ...
  std::optional<bool> serves;              // ... unless each rank says whether it is one
  bool update_on_kvstore = true;           // kvstore dist_sync: servers update, else workers do
  std::int64_t staleness = 4;              // kvstore dist_bounded: the largest delay, in updates
  std::int64_t split_above = 1'000'000;    // kvstore: elements of a key that is split over servers
  std::string stages;                      // pipeline: "4" stages, or "0-3,4-9": which pieces each has
  std::int64_t micro_batches = 4;          // pipeline
  std::string pipeline_schedule = "1f1b";  // pipeline: naive | gpipe | 1f1b
};

using Report = std::vector<std::pair<std::string, double>>;  // what a strategy measured, by name

class Strategy {
 public:
  virtual ~Strategy() = default;

  // Forward, backward and exchange for this rank's part of the global batch (which may be empty). The parameters stay
  // as they are. Returns the samples and the mean loss of the global batch: the same on every rank.
  virtual BatchTotals forward_backward(const Batch& batch) = 0;

  // Applies what forward_backward() found.
  virtual void update() = 0;

  virtual torch::Tensor forward(const torch::Tensor& data) = 0;  // with the current parameters, for validation
  virtual torch::nn::Module& model() = 0;
  virtual Optimizer& optimizer() = 0;  // the one whose learning rate and state count; others follow it
  virtual const PhaseTimes& phases() const = 0;

  // Where replicas may differ for a while: makes them one model. All ranks call it, before model() is validated or
  // saved.
  virtual void synchronise() {}

  // After every rank has put the same checkpoint, of `step`, into model(), optimizer() and state(): other replicas
  // follow, and random numbers that depend on the step go on from there. All ranks call it; blocks until all have.
  virtual void restored(std::int64_t /*step*/) {}

  // What a checkpoint has to keep beside model() and optimizer(); restored in place.
  virtual std::vector<NamedTensor> state() { return {}; }

  // The ranks that share out the batches, where that is not every rank of `world`: each loads its part of them. Without
  // data, a rank's batches are empty.
  virtual World data_world(const World& world) const { return world; }
  virtual bool has_data() const { return true; }

  // The ranks that take each step at the same time: validation and checkpoints are calls of all of them.
  // World::single() where every rank goes at its own pace; the first rank of `world` then validates and saves alone.
  virtual World loop_world(const World& world) const { return world; }

  virtual std::vector<std::string> devices() const { return {}; }  // of this rank, where a rank has several
  virtual Report report() const { return {}; }      // for the metrics of the run; all ranks of loop_world() call it
  virtual std::string table() const { return {}; }  // the same for people: lines; empty: nothing to show
};

struct StrategyInfo {
  const char* name;
  const char* description;  // one line of a table: at most 54 characters
  bool threads = false;     // its devices are threads of one process: that is what --ranks counts
};
const std::vector<StrategyInfo>& strategies();
const StrategyInfo& strategy_info(const std::string& name);  // throws UsageError naming those there are

// Throws UsageError (no such strategy or optimizer), and what the strategy throws when it is made.
std::unique_ptr<Strategy> make_strategy(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
