// train/options.h: every option of `lockstep train` and lockstep::run(), and how the command line fills it.
//
// Flow:    argv, --config FILE -> here -> lockstep/run.h
// Threads: a value
// Ranks:   every rank parses the same command line
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep {

struct TrainOptions {
  std::string model = "lenet";
  std::string data = "auto";  // what suits the model
  std::string data_dir;       // empty: where Debian puts the dataset
  std::string augment;        // lockstep/images.h
  int workers = 1;            // threads of each rank that load batches; 0: the step waits while they are loaded
  int prefetch = 4;           // batches that may lie ready
  std::int64_t skip_bad = 0;  // bad samples of an epoch and rank that may be left out
  std::string strategy = "ddp";
  std::string ranks = "1";  // a number, or "auto": one per core; where no launcher has started ranks already
  std::int64_t epochs = 5;
  std::int64_t batch_size = 256;  // global: over all ranks
  std::uint64_t seed = 1;
  std::string device = "auto";  // auto | cpu | cuda
  int threads = 0;              // per rank; 0: cores / ranks
  std::vector<int>
      devices_per_worker{};  // where devices are threads: in every rank, or in each; none: --ranks counts devices
  std::string algorithm = "direct";        // towers, ddp: direct | central | ring | tree
  std::string update = "device";           // towers: device | cpu
  bool refuse_uneven = false;              // towers
  std::int64_t average_every = 1;          // averaging: batches
  double outer_lr = 1;                     // averaging
  double outer_momentum = 0;               // averaging
  std::string kvstore = "local";           // kvstore: one of strategy/kvstore/kvstore_strategy.h
  int servers = 1;                         // kvstore: of the dist_ kinds, beside --ranks workers
  bool update_on_kvstore = true;           // kvstore dist_sync
  std::int64_t staleness = 4;              // kvstore dist_bounded: updates
  std::int64_t split_above = 1'000'000;    // kvstore: elements
  std::string stages;                      // pipeline: a number, or a range of pieces for each
  std::int64_t micro_batches = 4;          // pipeline
  std::string pipeline_schedule = "1f1b";  // pipeline: naive | gpipe | 1f1b
  std::string layout = "auto";             // auto | contiguous | channels_last
  double timeout = 300;                    // seconds that any wait for another rank may take

  std::string optimizer = "sgd";  // sgd | adam | adamw | lamb | lars
  double lr = 0.05;
  double momentum = 0.9;
  bool nesterov = false;
  double weight_decay = 0;
  double clip_norm = 0;               // of all gradients together; 0: off
  double clip_value = 0;              // of each element; 0: off
  double ema_decay = 0;               // 0: no moving average of the parameters
  bool separate_parameters = false;   // a copy in every rank instead of one per machine
  std::string precision = "float32";  // float32 | bfloat16: what forward computes in
  std::string compression = "none";   // none | fp16 | bf16 | powersgd | 2bit | topk
  double compression_amount = 0;      // powersgd: rank, 2bit: threshold, topk: share; 0: its default
  int virtual_shards = 0;             // the same bits on any number of ranks that divides this; 0: off
  std::string lr_scaling = "none";    // none | sqrt | linear
  std::int64_t lr_base_batch_size = 256;
  std::string schedule = "constant";  // constant | cosine | step
  double warmup_epochs = 0;
  double drop_every_epochs = 1;
  double drop_factor = 0.1;

  std::string metrics;
  std::string checkpoint_dir;
  std::int64_t checkpoint_every = 0;  // steps; 0: at the end of each epoch
  bool resume = false;
  std::int64_t max_steps = 0;  // stop after this many steps in all; 0: after the epochs
  bool quiet = false;
};

// Which choices the command line leaves to its user.
struct Choices {
  std::vector<std::string> models;    // empty: the program brings its own
  std::vector<std::string> datasets;  // likewise
};

void add_options(CLI::App& app, TrainOptions& options, const Choices& choices);

// Values that no parser can judge by themselves. Throws UsageError naming the option.
void check_options(const TrainOptions& options);

// Ranks that are servers, beside the workers that --ranks counts.
int server_count(const TrainOptions& options);

// --devices-per-worker of a worker: 0 if it is not given. Throws UsageError: a list that has no entry for it.
int devices_of_worker(const TrainOptions& options, int worker);

// --ranks as a number: "auto" is the number of cores that this process may use.
int rank_count(const TrainOptions& options);

}  // namespace lockstep
