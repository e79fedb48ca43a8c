// strategy/strategy.h: how the replicas of a model stay one model. The training loop knows only this interface.
//
// Flow:    Task + Batch -> compute(): forward, backward, exchange -> update() -> parameters
// Owns:    the model and the optimizer
// Threads: one thread
// Ranks:   every rank makes the same calls in the same order
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/collective/world.h"
#include "lockstep/gradient/reducer.h"
#include "lockstep/model/layout.h"
#include "lockstep/model/task.h"
#include "lockstep/optimizer/adam.h"
#include "lockstep/optimizer/lamb.h"
#include "lockstep/optimizer/lars.h"
#include "lockstep/optimizer/sgd.h"

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
  std::string layout = "auto";  // auto | contiguous | channels_last
  bool share_parameters = true;  // one copy per machine (strategy/ddp.h)
  int virtual_shards = 0;        // the same bits whatever the number of ranks (strategy/ddp.h); 0: off
};

class Strategy {
 public:
  virtual ~Strategy() = default;

  // Forward, backward and exchange for this rank's part of the global batch (which may be empty). The parameters stay as
  // they are. Returns the samples and the mean loss of the global batch: the same on every rank.
  virtual BatchTotals compute(const Batch& batch) = 0;

  // Applies what compute() found.
  virtual void update() = 0;

  virtual torch::Tensor forward(const torch::Tensor& data) = 0;  // with the current parameters, for validation
  virtual torch::nn::Module& model() = 0;
  virtual Optimizer& optimizer() = 0;

  // Every rank has just written the same values into model() and optimizer(), from a checkpoint. Blocks until all have.
  virtual void parameters_written() {}

  // The run resumes at this step: for random numbers that depend on it.
  virtual void go_on_from(std::int64_t /*step*/) {}

  virtual const PhaseTimes& phases() const = 0;
};

struct StrategyInfo {
  const char* name;
  const char* description;  // one line
};
const std::vector<StrategyInfo>& strategies();

// Throws UsageError (no such strategy or optimizer), and what the strategy throws when it is made.
std::unique_ptr<Strategy> make_strategy(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
